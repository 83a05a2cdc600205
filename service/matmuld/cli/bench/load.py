"""One client at work: a layer whose answers are known, the leanest HTTP client, and a stopwatch."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ..failure import Failure

Array = np.ndarray[Any, Any]

_WARM_CALLS = 20
_STALLED_SECONDS = 60


class Layer:
    """relu(x·Wᵀ + b) of one row, with as many outputs as inputs."""

    def __init__(self, size: int) -> None:
        random = np.random.default_rng(size)
        self.x = random.standard_normal((1, size), np.float32)
        self.weight = random.standard_normal((size, size), np.float32)
        self.bias = random.standard_normal(size, np.float32)
        exact = self.x.astype(float) @ self.weight.T.astype(float) + self.bias
        self._expected = np.maximum(exact, 0)
        magnitude = np.abs(self.x) @ np.abs(self.weight.T) + np.abs(self.bias)
        # No order of summing errs by more (Higham, Accuracy and Stability, §4.2).
        self._tolerance = (size + 1) * 2.0**-24 * magnitude

    def forward(self, x: Array) -> Array:
        """The layer in NumPy."""
        y: Array = np.matmul(x, self.weight.T)
        y += self.bias
        np.maximum(y, 0, out=y)
        return y

    def check(self, y: Array) -> None:
        """Raise Failure unless `y` is right."""
        if y.shape != self._expected.shape:
            raise Failure(f"expected an answer of shape {self._expected.shape}, got {y.shape}")
        if not (np.abs(y - self._expected) <= self._tolerance).all():
            raise Failure(f"wrong answer, off by up to {np.abs(y - self._expected).max():.3g}")


class Wire:
    """A keep-alive connection; requests are ready made, and replies are hardly looked at."""

    def __init__(self, address: str, reply_bytes: int = 1 << 16) -> None:
        self._address = address
        self._buffer = bytearray(reply_bytes)
        self._view = memoryview(self._buffer)

    def __enter__(self) -> Wire:
        self._socket = connected(self._address)
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def post(self, request: list[bytes]) -> memoryview:
        """The body of the reply; good until the next."""
        self.send(request)
        while (body := self.read()) is None:
            pass
        return body

    def send(self, request: list[bytes]) -> None:
        """Begin an exchange."""
        left = sum(map(len, request)) - self._socket.sendmsg(request)
        if left:
            self._socket.sendall(memoryview(request[-1])[-left:])
        self._start, self._end, self._received = 0, len(self._buffer), 0

    def read(self) -> memoryview | None:
        """Take what has come, or comes next: the body of the reply, or None while it has no end."""
        count = self._socket.recv_into(self._view[self._received :])
        if not count:
            raise Failure("a server closed the connection")
        self._received += count
        if not self._start and (head := self._buffer.find(b"\r\n\r\n", 0, self._received)) > 0:
            self._start = head + 4
            self._end = self._start + self._length(head)
        return self._view[self._start : self._end] if self._received >= self._end else None

    def fileno(self) -> int:
        return self._socket.fileno()

    def _length(self, head: int) -> int:
        if not self._buffer.startswith(b"HTTP/1.1 2"):
            raise Failure(f"a server said {bytes(self._buffer[:head])!r}")
        at = self._buffer.index(b"content-length: ", 0, head) + 16
        return int(self._buffer[at : self._buffer.index(b"\r", at)])


def connected(address: str) -> socket.socket:
    """A connection to ``unix:PATH`` or ``http://HOST:PORT``."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix:"))
    else:
        url = urlsplit(address)
        sock = socket.create_connection((url.hostname or "", url.port or 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(_STALLED_SECONDS)
    return sock


def post_request(target: str, media_type: str, body: bytes) -> list[bytes]:
    """A request to post as it is."""
    head = (
        f"POST {target} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return [head.encode(), body]


@dataclass
class Subject:
    """A call to be measured, the check of its answer, and what must be open meanwhile."""

    call: Callable[[], Any]
    check: Callable[[Any], None]
    connection: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def measure(self, seconds: float) -> list[float]:
        """What each call took, one after the other; the first and last answers are checked."""
        took = []
        with self.connection:
            self.check(self.call())
            for _ in range(_WARM_CALLS):
                self.call()
            began = perf_counter()
            end = began + seconds
            while began < end:
                self.call()
                took.append(perf_counter() - began)
                began = perf_counter()
            self.check(self.call())
        return took


class Steal:
    """The share of the cores' time that the hypervisor has taken since the last look."""

    def __init__(self) -> None:
        self._stolen, self._total = _cpu_ticks()

    def share(self) -> float:
        stolen, total = _cpu_ticks()
        share = (stolen - self._stolen) / max(total - self._total, 1)
        self._stolen, self._total = stolen, total
        return round(share, 4)


def _cpu_ticks() -> tuple[int, int]:
    """Stolen, and in all, by proc_stat(5); guests' time is in that of users already."""
    with Path("/proc/stat").open() as lines:
        ticks = [int(field) for field in next(lines).split()[1:9]]
    return ticks[7], sum(ticks)
