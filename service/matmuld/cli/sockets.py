"""The sockets that a service listens on."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

from .failure import Failure

_BACKLOG = 2048


@contextmanager
def listening(addresses: Sequence[str]) -> Iterator[list[socket.socket]]:
    """Sockets listening on every address, closed at the end, and those in the file system removed.

    Raises:
        Failure: an address cannot be had.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for address in addresses:
            try:
                if address.startswith("unix:"):
                    opened = stack.enter_context(_unix(address.removeprefix("unix:")))
                else:
                    opened = stack.enter_context(_tcp(address))
            except OSError as error:
                reason = error.strerror or error
                raise Failure(f"cannot listen on {address}: {reason}") from error
            sockets.append(opened)
        yield sockets


def address_of(sock: socket.socket) -> str:
    """As clients name it."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


def _tcp(address: str) -> socket.socket:
    url = urlsplit(address)
    family, kind, protocol, _, place = socket.getaddrinfo(
        url.hostname, url.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


@contextmanager
def _unix(path: str) -> Iterator[socket.socket]:
    """A socket file that only this user can open."""
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        mask = os.umask(0o177)  # from its first moment, not by a later chmod
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        made = os.stat(path)
        sock.listen(_BACKLOG)
        try:
            yield sock
        finally:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), made):
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove the socket file of a service that is gone."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise Failure(f"cannot listen on unix:{path}: the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise Failure(f"cannot listen on unix:{path}: another service is listening there")
