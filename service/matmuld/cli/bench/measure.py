"""The measuring process: one client, one keep-alive connection to each server, cells in interleaved rounds.

    python -m matmuld.cli.bench.measure DEVICE ROUNDS SECONDS

Prints a line of JSON about the service, then one for each cell of each round. Exit status 1: an answer was wrong.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from matmuld_client import Client
from matmuld_client.wire import MSGPACK, pack, unpack

from ..failure import Failure
from ..server import child
from ..sockets import address_of, listening
from .cells import SIZES, TRANSPORTS, Cell, Measurement

Array = np.ndarray[Any, Any]

WARM_CALLS = 20
STALLED_SECONDS = 60


class Layer:
    """relu(x·Wᵀ + b) of one row, as many outputs as inputs, and how far an answer may be off."""

    def __init__(self, size: int) -> None:
        random = np.random.default_rng(size)
        self.x = random.standard_normal((1, size), np.float32)
        self.weight = random.standard_normal((size, size), np.float32)
        self.bias = random.standard_normal(size, np.float32)
        exact = self.x.astype(float) @ self.weight.T.astype(float) + self.bias
        self._expected = np.maximum(exact, 0)
        magnitude = np.abs(self.x) @ np.abs(self.weight.T) + np.abs(self.bias)
        self._tolerance = (size + 1) * 2.0**-24 * magnitude  # of a sum in any order (Higham)

    def product(self) -> Array:
        """It in NumPy, in this process."""
        y = np.matmul(self.x, self.weight.T)
        y += self.bias
        return np.maximum(y, 0, out=y)

    def check(self, y: Array) -> None:
        """Raise Failure unless `y` is the answer."""
        if y.shape != self._expected.shape:
            raise Failure(f"expected an answer of shape {self._expected.shape}, got {y.shape}")
        error = np.abs(y - self._expected)
        if not (error <= self._tolerance).all():
            raise Failure(f"the answer is off by up to {error.max():.3g}")


class Wire:
    """Requests made ready once, and replies hardly looked at: the leanest client that Python has."""

    def __init__(self, address: str) -> None:
        if address.startswith("unix:"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address.removeprefix("unix:"))
        else:
            url = urlsplit(address)
            assert url.hostname is not None and url.port is not None
            self._socket = socket.create_connection((url.hostname, url.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(STALLED_SECONDS)
        self._buffer = bytearray(1 << 16)
        self._view = memoryview(self._buffer)

    def post(self, request: list[bytes]) -> memoryview:
        """The body of the reply, until the next request."""
        self._socket.sendmsg(request)
        start, end, received = 0, len(self._buffer), 0
        while received < end:
            count = self._socket.recv_into(self._view[received:])
            if not count:
                raise Failure("a server closed its connection")
            received += count
            if not start and (head := self._buffer.find(b"\r\n\r\n", 0, received)) > 0:
                start = head + 4
                end = start + self._body_length(head)
        return self._view[start:end]

    def _body_length(self, head: int) -> int:
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            raise Failure(f"a server refused: {bytes(self._buffer[:head])!r}")
        at = self._buffer.index(b"content-length: ", 0, head) + len(b"content-length: ")
        return int(self._buffer[at : self._buffer.index(b"\r\n", at)])


@dataclass
class Subject:
    """What a cell measures: a call, and a check of what it gives."""

    call: Callable[[], Any]
    check: Callable[[Any], None]

    def measure(self, seconds: float) -> list[float]:
        """Seconds of every call, one after the other, for so long; the first and last answers are checked."""
        self.check(self.call())
        for _ in range(WARM_CALLS):
            self.call()
        took = []
        began = perf_counter()
        end = began + seconds
        while began < end:
            self.call()
            done = perf_counter()
            took.append(done - began)
            began = perf_counter()
        self.check(self.call())
        return took


def http_request(path: str, body: bytes) -> list[bytes]:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: {MSGPACK}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return [head.encode(), body]


def subjects(
    stack: ExitStack, client: Client, addresses: dict[tuple[str, str], str]
) -> Iterator[tuple[Cell, Subject]]:
    """Every cell and what it calls."""
    wires = {place: Wire(address) for place, address in addresses.items()}
    clients = {way: stack.enter_context(Client(addresses["matmuld", way])) for way in TRANSPORTS}
    for size in SIZES:
        layer = Layer(size)
        yield Cell("numpy", "in process", size), Subject(layer.product, layer.check)
        weight, bias = client.put(layer.weight, pinned=True), client.put(layer.bias, pinned=True)
        header = {
            "x": {"dtype": "float32", "shape": [1, size], "payload": 0},
            "weight": {"tensor": weight.handle},
            "bias": {"tensor": bias.handle},
            "activation": "relu",
        }
        body = b"".join(pack(header, [layer.x.tobytes()]))
        request = http_request("/v1/linear/forward", body)
        for way in TRANSPORTS:
            def post(wire: Wire = wires["matmuld", way], request: list[bytes] = request) -> memoryview:
                return wire.post(request)

