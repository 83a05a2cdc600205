"""Clients that stop, or crawl, within a request or a reply: told if possible, and cut off."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matmuld.http.connection import HEAD_LIMIT, Pace

from ..local import MSGPACK, Answer, Wire, packed, raw, running, tensor
from .refusals import BODY, FORWARD, JSON, OCTETS, TENSORS, forward, unchanged, wait_for, works

PATIENCE = 0.4
RATE = 100_000
LARGE = 16 << 20
"""Bytes of a reply; what the kernel takes of it at once is far less."""


class Brisk(Wire):
    """Closes its connection after every request, for it would be idle for too long."""

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        try:
            return super().request(method, path, body, headers)
        finally:
            self.close()


class Slow:
    """A service that has little patience."""

    def __init__(self, path: Path, wire: Wire) -> None:
        self.path = path
        self.wire = wire

    @contextmanager
    def client(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(str(self.path))
            yield client

    def admitted(self) -> int:
        return int(self.wire.get("/v1/info")["requests"]["admitted"])


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    path = tmp_path / "s"
    timeouts = {"read_timeout_s": PATIENCE, "write_timeout_s": PATIENCE, "min_rate": RATE}
    with running(path, device="cpu", **timeouts):
        wire = Brisk(path)
        assert all(works(wire) for _ in range(3))
        service = Slow(path, wire)
        with unchanged(wire):
            yield service
            wait_for(lambda: service.admitted() == 0)


def head(path: str, length: int, form: str = MSGPACK) -> bytes:
    content = f"Content-Type: {form}\r\nContent-Length: {length}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{content}\r\n".encode()


def until_closed(client: socket.socket) -> bytes:
    received = b""
    try:
        while part := client.recv(1 << 20):
            received += part
    except ConnectionResetError:  # what it had sent was not read to the end
        pass
    return received


def crawl(client: socket.socket, data: bytes, seconds: float = 20.0) -> None:
    """Send a byte every now and then, until the service has enough."""
    deadline = time.monotonic() + seconds
    for byte in data:
        assert time.monotonic() < deadline, "it goes on"
        try:
            client.sendall(bytes([byte]))
        except (BrokenPipeError, ConnectionResetError):
            return
        time.sleep(PATIENCE / 20)


@pytest.mark.parametrize("sent", [0, 1000])
@pytest.mark.parametrize("path", [FORWARD, f"{TENSORS}?dtype=float32&shape=25000", TENSORS])
def test_a_body_that_stops_is_answered_and_the_connection_closed(
    slow: Slow, path: str, sent: int
) -> None:
    form = OCTETS if "?" in path else JSON
    with slow.client() as client:
        began = time.monotonic()
        client.sendall(head(path, 100_000, form) + bytes(sent))
        reply, _, body = until_closed(client).partition(b"\r\n\r\n")
        took = time.monotonic() - began
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close" in reply
    document = json.loads(body)
    assert document["code"] == "request_timeout"
    assert document["detail"] == "the body came too slowly, or not to its end"
    assert PATIENCE * 0.9 < took < PATIENCE * 4


def test_a_body_that_crawls_is_answered_and_the_connection_closed(slow: Slow) -> None:
    with slow.client() as client:
        client.sendall(head(FORWARD, 100_000))
        crawl(client, bytes(100_000))
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")


def test_a_chunked_body_that_stops(slow: Slow) -> None:
    fields = f"Content-Type: {MSGPACK}\r\nTransfer-Encoding: chunked\r\n"
    with slow.client() as client:
        client.sendall(f"POST {FORWARD} HTTP/1.1\r\nHost: a\r\n{fields}\r\n5\r\nabcde".encode())
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_comes_in_pieces_but_steadily_is_read(slow: Slow) -> None:
    """For longer than anybody may be silent, and above the least rate."""
    x = np.ones((50_000, 3), np.float32)
    header = {"x": tensor(x, 0), "weight": tensor(np.ones((1, 3), np.float32), 1)}
    body = packed(header, raw(x), raw(np.ones((1, 3), np.float32)))
    step = len(body) // 20
    with slow.client() as client:
        client.sendall(head(FORWARD, len(body)))
        for at in range(0, len(body), step):
            client.sendall(body[at : at + step])
            time.sleep(PATIENCE / 8)
        assert client.recv(1 << 10).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/matmul HTTP/1.1\r\nHost: a\r\n"])
def test_a_head_that_does_not_come_to_its_end(slow: Slow, sent: bytes) -> None:
    with slow.client() as client:
        client.sendall(sent)
        reply = until_closed(client)
    if sent:
        assert reply.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert reply.endswith(b"\r\n\r\nThe request did not come to its end in time.")
    else:
        assert reply == b""


def test_a_head_that_does_not_come_to_its_end_on_a_connection_in_use(slow: Slow) -> None:
    body = packed(forward(), *BODY)
    with slow.client() as client:
        client.sendall(head(FORWARD, len(body)) + body)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /health/live HT")
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_crawls(slow: Slow) -> None:
    with slow.client() as client:
        client.sendall(b"GET /health/live HTTP/1.1\r\nX-Long: ")
        crawl(client, b"a" * 100_000)
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")


def test_a_head_without_end(slow: Slow) -> None:
    with slow.client() as client:
        client.sendall(b"GET /health/live HTTP/1.1\r\n")
        try:
            for _ in range(64):
                client.sendall(b"X-More: " + b"a" * (HEAD_LIMIT // 8) + b"\r\n")
                time.sleep(0.001)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert until_closed(client).startswith(b"HTTP/1.1 431 ")


def test_a_head_without_end_behind_a_request_at_work(slow: Slow) -> None:
    """It is not answered within the other's reply."""
    handle = hold(slow)
    with slow.client() as client:
        get = f"GET {TENSORS}/{handle} HTTP/1.1\r\nHost: a\r\nAccept: {OCTETS}\r\n\r\n"
        client.sendall(get.encode() + b"GET /health/live HTTP/1.1\r\n")
        try:
            for _ in range(64):
                client.sendall(b"X-More: " + b"a" * (HEAD_LIMIT // 8) + b"\r\n")
                time.sleep(0.001)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert b"The head" not in until_closed(client)
    slow.wire.request("DELETE", f"{TENSORS}/{handle}")


def test_a_refused_body_that_never_comes(slow: Slow) -> None:
    with slow.client() as client:
        client.sendall(head(FORWARD, 1 << 40))
        began = time.monotonic()
        assert until_closed(client).startswith(b"HTTP/1.1 413 ")
        assert time.monotonic() - began < PATIENCE * 4


def test_a_refused_body_that_crawls(slow: Slow) -> None:
    with slow.client() as client:
        client.sendall(head(FORWARD, 1 << 40))
        crawl(client, bytes(100_000))
        assert until_closed(client).startswith(b"HTTP/1.1 413 ")


def hold(slow: Slow) -> str:
    created = slow.wire.send(TENSORS, {"dtype": "float32", "shape": [LARGE // 4]})
    return str(created.header["tensor"])


@pytest.mark.parametrize("accept", [OCTETS, MSGPACK])
def test_a_reply_that_nobody_takes_holds_nothing_for_long(slow: Slow, accept: str) -> None:
    handle = hold(slow)
    with slow.client() as client:
        get = f"GET {TENSORS}/{handle} HTTP/1.1\r\nHost: a\r\nAccept: {accept}\r\n\r\n"
        client.sendall(get.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        slow.wire.request("DELETE", f"{TENSORS}/{handle}")
        wait_for(lambda: slow.wire.get("/v1/info")["memory"]["used_bytes"] < LARGE)
        assert len(until_closed(client)) < LARGE


def test_a_result_that_nobody_takes_gives_its_place_back(slow: Slow) -> None:
    x, weight = np.ones((LARGE // 4, 1), np.float32), np.ones((1, 1), np.float32)
    body = packed({"x": tensor(x, 0), "weight": tensor(weight, 1)}, raw(x), raw(weight))
    with slow.client() as client:
        client.sendall(head(FORWARD, len(body)) + body)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        info = slow.wire.get("/v1/info")["requests"]
        assert (info["admitted"], info["working"]) == (1, 0)
        wait_for(lambda: slow.admitted() == 0)
        assert len(until_closed(client)) < LARGE


def test_a_reply_that_is_taken_drop_by_drop_is_cut_off(slow: Slow) -> None:
    handle = hold(slow)
    with slow.client() as client:
        get = f"GET {TENSORS}/{handle} HTTP/1.1\r\nHost: a\r\nAccept: {OCTETS}\r\n\r\n"
        client.sendall(get.encode())
        received, deadline = 0, time.monotonic() + 20
        while part := client.recv(1000):
            received += len(part)
            if received < 200_000:
                time.sleep(PATIENCE / 20)
            assert time.monotonic() < deadline
    assert received < LARGE
    slow.wire.request("DELETE", f"{TENSORS}/{handle}")


def test_a_reply_that_is_taken_slowly_but_steadily_is_whole(slow: Slow) -> None:
    handle = hold(slow)
    with slow.client() as client:
        get = f"GET {TENSORS}/{handle} HTTP/1.1\r\nHost: a\r\nAccept: {OCTETS}\r\n\r\n"
        client.sendall(get.encode())
        received = b""
        while len(received) < LARGE:
            part = client.recv(1 << 19)
            assert part
            received += part
            time.sleep(PATIENCE / 200)
    assert received.partition(b"\r\n\r\n")[2].count(0) > LARGE - 4096
    slow.wire.request("DELETE", f"{TENSORS}/{handle}")


def test_a_request_that_takes_long_is_no_slow_client(slow: Slow) -> None:
    side = 2048
    shape = {"dtype": "float32", "shape": [side, side]}
    handles = [slow.wire.send(TENSORS, shape).header["tensor"] for _ in range(2)]
    began = time.monotonic()
    layers = [{"weight": {"tensor": handles[0]}}]
    while time.monotonic() - began < 2 * PATIENCE and len(layers) < 64:
        began = time.monotonic()
        layers *= 2
        header = {"x": {"tensor": handles[1]}, "layers": layers, "outputs": {"y": "tensor"}}
        answer = slow.wire.send("/v1/mlp/forward", header)
        assert answer.status == 200
        slow.wire.request("DELETE", f"{TENSORS}/{answer.header['y']['tensor']}")
    for handle in handles:
        slow.wire.request("DELETE", f"{TENSORS}/{handle}")


def test_the_pace_that_is_kept() -> None:
    pace = Pace(10, rate=5)
    assert pace.keeps(100, 1000)
    assert pace.keeps(109, 1000)
    assert not pace.keeps(110, 1000)
    assert pace.keeps(110, 1001)
    assert not pace.keeps(111, 1004)
    assert pace.keeps(111, 1005)
    assert pace.keeps(119, 1045)
    pace.reset()
    assert pace.keeps(200, 0)
    assert pace.keeps(209, 1)
    assert not pace.keeps(212, 1)
