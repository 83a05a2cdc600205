"""HTTP/1.1 on one connection: a request costs four system calls, and bodies are not copied."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from select import POLLIN, POLLOUT, poll

import numpy as np

from .errors import Timeout, TransportError
from .wire import Buffer

_HEAD_LIMIT = 1 << 16
_IOV_MAX = 1024
LONGEST_WAIT = 1e5  # seconds in one system call; also what "no limit" comes to


class Unanswered(Exception):
    """The connection ended before its reply did; callers of the transport never see it."""


class Reply:
    """A status line and header fields, in lower case, and the body."""

    __slots__ = ("_head", "body", "status")

    def __init__(self, head: str) -> None:
        try:
            self.status = int(head[9:12])
        except ValueError:
            raise TransportError(f"this is no HTTP service: it said {head[:40]!r}") from None
        self._head = head
        self.body = memoryview(b"")

    def field(self, name: str) -> str:
        """The value of a header field, empty if there is none."""
        at = self._head.find(f"\r\n{name}:")
        if at < 0:
            return ""
        start = at + len(name) + 3
        end = self._head.find("\r\n", start)
        return self._head[start : end if end >= 0 else None].strip()


class Connection:
    """One keep-alive connection, for one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._poll = poll()
        self._poll.register(sock, POLLIN)
        self._buffer = bytearray(_HEAD_LIMIT)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self.sent = 0
        self.reusable = False

    def is_stale(self) -> bool:
        """Whether something came though nothing was asked: the end of the connection."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        self._sock.close()

    def exchange(self, parts: Sequence[Buffer], length: int, deadline: float) -> Reply:
        """Send a request of `length` bytes and read its reply, which may come before it is sent."""
        self._start = self._end = 0
        self.reusable = False
        all_sent = self._send(parts, length, deadline)
        head = self._read_head(deadline)
        while head.startswith("http/1.1 1"):
            head = self._read_head(deadline)
        reply = Reply(head)
        if reply.status not in (204, 304):
            reply.body = self._read_body(reply, deadline)
        stays_open = head.startswith("http/1.1") and reply.field("connection") != "close"
        self.reusable = all_sent and stays_open and self._start == self._end
        return reply

    def _send(self, parts: Sequence[Buffer], length: int, deadline: float) -> bool:
        """Send `parts`; False if the service answered or hung up before it had them all."""
        self.sent = 0
        while True:
            try:
                sent = self._sock.sendmsg(parts[:_IOV_MAX])
            except BlockingIOError:
                sent = 0
            except OSError:
                return False  # what it said before it hung up can still be read
            self.sent += sent
            if self.sent == length:
                return True
            parts = _after(parts, sent)
            if not sent and self._wait_to_send(deadline) & POLLIN:
                return False

    def _wait_to_send(self, deadline: float) -> int:
        self._poll.modify(self._sock, POLLIN | POLLOUT)
        events = self._wait(deadline)
        self._poll.modify(self._sock, POLLIN)
        return events

    def _wait(self, deadline: float) -> int:
        while (remaining := deadline - time.monotonic()) > 0:
            if ready := self._poll.poll(min(remaining, LONGEST_WAIT) * 1e3):
                return ready[0][1]
        raise Timeout("no answer within the time allowed")

    def _receive_into(self, view: memoryview, deadline: float) -> int:
        """Wait for bytes; how many came, at least one."""
        while True:
            self._wait(deadline)
            try:
                received = self._sock.recv_into(view)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Unanswered(f"the connection broke: {error}") from error
            if received:
                return received
            raise Unanswered("the service closed the connection before it answered")

    def _fill(self, deadline: float) -> None:
        if self._end == _HEAD_LIMIT:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._end == _HEAD_LIMIT:
            raise TransportError(f"the head of the reply is over {_HEAD_LIMIT} bytes")
        self._end += self._receive_into(self._view[self._end :], deadline)

    def _read_until(self, mark: bytes, deadline: float) -> str:
        while (at := self._buffer.find(mark, self._start, self._end)) < 0:
            self._fill(deadline)
        text = self._buffer[self._start : at].decode("latin-1").lower()
        self._start = at + len(mark)
        return text

    def _read_head(self, deadline: float) -> str:
        return self._read_until(b"\r\n\r\n", deadline)

    def _read_body(self, reply: Reply, deadline: float) -> memoryview:
        try:
            if reply.field("transfer-encoding") == "chunked":
                return self._read_chunks(deadline)
            body = _room_for(int(reply.field("content-length")))
            self._read_into(body, deadline)
        except Unanswered as error:
            raise TransportError(f"the reply broke off: {error}") from error
        except ValueError as error:
            raise TransportError(f"the reply does not say how long it is: {error}") from error
        return body

    def _read_into(self, view: memoryview, deadline: float) -> None:
        """Fill `view`, first with what the buffer already has."""
        at = min(self._end - self._start, len(view))
        view[:at] = self._view[self._start : self._start + at]
        self._start += at
        while at < len(view):
            at += self._receive_into(view[at:], deadline)

    def _read_chunks(self, deadline: float) -> memoryview:
        body = bytearray()
        while size := int(self._read_until(b"\r\n", deadline).partition(";")[0], 16):
            body += bytes(size)
            with memoryview(body) as view:
                self._read_into(view[-size:], deadline)
            self._read_until(b"\r\n", deadline)
        while self._read_until(b"\r\n", deadline):
            pass
        return memoryview(body)


def _after(parts: Sequence[Buffer], sent: int) -> Sequence[Buffer]:
    """What is left of `parts` behind their first `sent` bytes."""
    for index, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[index + 1 :]]
        sent -= len(part)
    return ()


def _room_for(length: int) -> memoryview:
    """Room for a body whose end stands at a multiple of 16, so that the last payload is aligned."""
    before = -length % 16
    return np.empty(before + length, np.uint8).data[before:]
