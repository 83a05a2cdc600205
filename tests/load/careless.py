"""Careless users: they hang up, send nonsense, and forget what they hold."""

from __future__ import annotations

import socket
import struct
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import urlsplit

import msgpack
import numpy as np
from locust import between, task
from matmuld_client import Layer
from matmuld_client.wire import MSGPACK, OCTETS, pack

from tests.load.caller import Caller
from tests.reference import Host, random

FORWARD = "/v1/linear/forward"
BATCH, INPUTS, OUTPUTS = 48, 96, 80
SIZE = 256
TIMEOUT = 30

X = np.ones((BATCH, INPUTS), np.float32)
WEIGHT = np.ones((OUTPUTS, INPUTS), np.float32)
NOTHING = {"tensor": "no handle"}


def tensor(array: Host, payload: int) -> dict[str, object]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "payload": payload}


def body(**changes: object) -> bytes:
    """A valid forward pass, but for what is changed."""
    header = {"x": tensor(X, 0), "weight": tensor(WEIGHT, 1), **changes}
    return b"".join(pack(header, [X.tobytes(), WEIGHT.tobytes()]))


class Bad(NamedTuple):
    """A request that must be refused, and how."""

    status: int
    code: str
    body: bytes
    content_type: str = MSGPACK


BAD = {
    "truncated": Bad(400, "malformed", body()[:-5]),
    "trailing bytes": Bad(400, "malformed", body() + b"\xc0"),
    "not msgpack": Bad(400, "malformed", b"\xc1" * 64),
    "empty": Bad(400, "malformed", b""),
    "unknown field": Bad(400, "malformed", body(wieght=1)),
    "misfit": Bad(422, "invalid_operands", body(weight={**tensor(X, 1), "shape": [96, 80]})),
    "unknown handle": Bad(404, "unknown_handle", b"".join(pack({"x": NOTHING, "weight": NOTHING}))),
    "text": Bad(415, "unsupported_media_type", body(), "text/plain"),
}  # fmt: skip


class Careless(Caller):
    """Does all that a client should not do; what is answered must be as the protocol says."""

    weight = 2
    wait_time = between(0, 0.05)

    def on_start(self) -> None:
        super().on_start()
        self.whole = random(self.rng, (SIZE, SIZE), "float32")
        self.kept = self.client.put(self.whole, pinned=True)

    @task(4)
    def send_nonsense(self) -> None:
        name = list(BAD)[int(self.rng.integers(len(BAD)))]
        bad = BAD[name]

        def check(answer: tuple[int, bytes]) -> None:
            status, document = answer
            assert status == bad.status, f"expected status {bad.status}, got {answer}"
            code = msgpack.unpackb(document)["code"]
            assert code == bad.code, f"expected code {bad.code}, got {answer}"

        self.ask(f"nonsense: {name}", lambda: self._post(bad), check)

    @task(1)
    def speak_no_http(self) -> None:
        def check(reply: bytes) -> None:
            assert reply.startswith(b"HTTP/1.1 400"), f"expected a 400, got {reply!r}"

        self.ask("nonsense: no HTTP", lambda: self._say(b"\x00\x01matmul, please\r\n\r\n"), check)

    @task(2)
    def hang_up_midway(self) -> None:
        request = _head("POST", FORWARD, MSGPACK, len(body())) + body()
        said = request[: int(self.rng.integers(1, len(request)))]
        self.ask("hang up midway", lambda: self._hang_up(said))

    @task(2)
    def hang_up_before_the_answer(self) -> None:
        asked = body(activation="relu", save_aux=True, outputs={"y": "tensor"})
        request = _head("POST", FORWARD, MSGPACK, len(asked)) + asked
        self.ask("hang up before the answer", lambda: self._hang_up(request))

    @task(2)
    def break_off_an_upload(self) -> None:
        target = f"/v1/tensors/{self.kept.handle}"
        zeros = bytes(int(self.rng.integers(self.whole.nbytes)))
        head = _head("PUT", target, OCTETS, self.whole.nbytes)
        self.ask("break off an upload", lambda: self._hang_up(head + zeros))

        def check(contents: Host) -> None:
            assert np.array_equal(contents, self.whole), "an upload that broke off left its marks"

        self.ask("GET tensors", self.kept.numpy, check)

    @task(2)
    def forget_handles(self) -> None:
        layer = Layer(WEIGHT, activation="relu")
        y, aux = self.ask(
            "linear/forward, forgotten",
            lambda: self.client.linear(X, WEIGHT, activation="relu", save_aux=True, out="tensor"),
        )
        _, tape = self.ask(
            "mlp/forward, forgotten", lambda: self.client.mlp(X, [layer], save_tape=True)
        )
        for held in (y, aux, tape):
            held.release()

    @task(1)
    def free_twice(self) -> None:
        handle = self.client.put(X).release()

        def free() -> int:
            return self._request("DELETE", f"/v1/tensors/{handle}")[0]

        for expected in (204, 410):

            def check(status: int, expected: int = expected) -> None:
                assert status == expected, f"expected status {expected}, got {status}"

            self.ask(f"DELETE tensors: {expected}", free, check)

    def _post(self, bad: Bad) -> tuple[int, bytes]:
        return self._request("POST", FORWARD, bad.body, bad.content_type)

    def _request(
        self, method: str, target: str, body: bytes = b"", content_type: str = MSGPACK
    ) -> tuple[int, bytes]:
        """Status and body of the reply, on a connection of its own."""
        connection = HTTPConnection("localhost")
        connection.sock = connected(self.address)
        headers = {"Content-Type": content_type, "Accept": MSGPACK}
        try:
            connection.request(method, target, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def _say(self, words: bytes) -> bytes:
        with connected(self.address) as sock:
            sock.sendall(words)
            return sock.recv(1 << 16)

    def _hang_up(self, words: bytes) -> None:
        """Say so much and close; every other time, over TCP, by a reset."""
        with connected(self.address) as sock:
            sock.sendall(words)
            if sock.family != socket.AF_UNIX and self.rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _head(method: str, target: str, content_type: str, length: int) -> bytes:
    return (
        f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def connected(address: str) -> socket.socket:
    """A connection to ``unix:PATH`` or ``http://HOST:PORT``."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(TIMEOUT)
        sock.connect(address.removeprefix("unix:"))
        return sock
    url = urlsplit(address)
    return socket.create_connection((url.hostname or "", url.port or 0), TIMEOUT)
