"""Connections to one service, kept open between requests."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ._http import LONGEST_WAIT, Connection, Reply, Unanswered
from .errors import Timeout, TransportError
from .wire import Buffer

_BACKLOG_RETRY = 1e-3
_IDEMPOTENT = frozenset({"GET", "PUT", "DELETE"})


class Transport:
    """Connections to one service; threads may share it, and a forked child makes its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._unix_path = ""
        self._prefix = ""
        host = "localhost"
        scheme, _, path = str(url).partition(":")
        if scheme == "unix" and path:
            self._unix_path = path
        else:
            parts = urlsplit(str(url))
            if parts.scheme != "http" or not parts.hostname:
                raise ValueError(f"expected http://host:port or unix:/path, got {url!r}")
            self._tcp_address = (parts.hostname, parts.port or 80)
            self._prefix = parts.path.rstrip("/")
            host = parts.netloc
        self._fixed_head = f" HTTP/1.1\r\nHost: {host}\r\n"
        self._idle: deque[Connection] = deque()
        self._pid = os.getpid()
        self._closed = False

    def request(
        self, method: str, target: str, fields: str, body: Sequence[Buffer], deadline: float
    ) -> Reply:
        """The reply, whatever its status; `fields` are header lines.

        Where a kept connection turns out to be dead, the request is sent once more if the service
        cannot have begun with it, or may carry it out twice.
        """
        if self._closed:
            raise TransportError("the client is closed")
        length = sum(map(len, body))
        head = (
            f"{method} {self._prefix}{target}{self._fixed_head}{fields}"
            f"Content-Length: {length}\r\n\r\n"
        ).encode("ascii")
        parts, length = [head, *body], len(head) + length
        try:
            return self._ask(method in _IDEMPOTENT, parts, length, deadline)
        except Unanswered as error:
            raise TransportError(str(error)) from error.__cause__

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _ask(self, twice: bool, parts: list[Buffer], length: int, deadline: float) -> Reply:
        connection = self._take_idle()
        if connection is not None:
            try:
                return self._exchange(connection, parts, length, deadline)
            except Unanswered:
                if connection.sent and not twice:
                    raise
        return self._exchange(self._connect(deadline), parts, length, deadline)

    def _exchange(
        self, connection: Connection, parts: list[Buffer], length: int, deadline: float
    ) -> Reply:
        try:
            reply = connection.exchange(parts, length, deadline)
        except BaseException:
            connection.close()
            raise
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def _take_idle(self) -> Connection | None:
        """The connection used last that is still good; those found dead are closed."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            inherited, self._idle = self._idle, deque()
            for connection in inherited:
                connection.close()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if not connection.is_stale():
                return connection
            connection.close()

    def _connect(self, deadline: float) -> Connection:
        try:
            return Connection(self._open(deadline))
        except TimeoutError as error:
            raise Timeout(f"no connection to {self._url} within the time allowed") from error
        except OSError as error:
            raise TransportError(f"no connection to {self._url}: {error}") from error

    def _open(self, deadline: float) -> socket.socket:
        if self._unix_path:
            return _open_socket(socket.AF_UNIX, self._unix_path, deadline)
        failure = OSError("the name has no address")
        for info in socket.getaddrinfo(*self._tcp_address, type=socket.SOCK_STREAM):
            try:
                sock = _open_socket(info[0], info[4], deadline)
            except OSError as error:
                failure = error
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
        raise failure


def _open_socket(family: int, address: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        while (remaining := deadline - time.monotonic()) > 0:
            sock.settimeout(min(remaining, LONGEST_WAIT))
            try:
                sock.connect(address)
            except BlockingIOError:  # a unix socket whose backlog is full does not wait
                time.sleep(_BACKLOG_RETRY)
            else:
                return sock
        raise TimeoutError
    except BaseException:
        sock.close()
        raise
