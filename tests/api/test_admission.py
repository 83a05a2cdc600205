"""A service with more to do than it can: who is refused, who waits, and in which order they go."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from matmuld_client import Client, DeadlineExceeded, Overloaded

from ..local import MSGPACK, Answer, UnixConnection, Wire, packed, raw, running, tensor
from .refusals import (
    BODY,
    FORWARD,
    MLP_FORWARD,
    OCTETS,
    TENSORS,
    WEIGHT,
    X,
    forward,
    refused_body,
    unchanged,
    wait_for,
)

SIDE = 2048
LONG = 1.0
"""Seconds that the service is to be at a long request."""
QUEUE = 3


class Busy:
    """A service that takes one request at a time, and is at one that takes long."""

    def __init__(self, path: Path, wire: Wire) -> None:
        self.path = path
        self.wire = wire
        self._large = [
            wire.send(TENSORS, {"dtype": "float32", "shape": [SIDE, SIDE]}).header["tensor"]
            for _ in range(3)
        ]
        self._layers = 1
        times = []
        for _ in range(3):
            began = time.perf_counter()
            assert self._long(wire).status == 200
            times.append(time.perf_counter() - began)
        self._layers = min(math.ceil(LONG / min(times)), 64)

    def _long(self, wire: Wire) -> Answer:
        """A stack of products whose result goes into a tensor."""
        x, weight, y = self._large
        layers = [{"weight": {"tensor": weight}}] * self._layers
        header = {"x": {"tensor": x}, "layers": layers, "outputs": {"y": {"tensor": y}}}
        return wire.send(MLP_FORWARD, header)

    def requests(self) -> dict[str, int]:
        return dict(self.wire.get("/v1/info")["requests"])

    @contextmanager
    def working(self) -> Iterator[None]:
        """At work on a long request, which is answered in the end."""
        with self.another() as wire, ThreadPoolExecutor(1) as pool:
            slow = pool.submit(self._long, wire)
            wait_for(lambda: self.requests()["working"] == 1)
            yield
            assert slow.result().status == 200

    @contextmanager
    def another(self) -> Iterator[Wire]:
        wire = Wire(self.path)
        yield wire
        wire.close()

    @contextmanager
    def queued(self, count: int, headers: dict[str, str] | None = None) -> Iterator[list[Answer]]:
        """That many small requests in the queue; their answers are right, when all is done."""
        before = self.requests()["waiting"]
        answers: list[Answer] = []
        threads = [
            threading.Thread(target=self._small, args=(answers, headers)) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: self.requests()["waiting"] == before + count)
        yield answers
        for thread in threads:
            thread.join()
        assert len(answers) == count
        assert all(is_right(answer) for answer in answers)

    def _small(self, answers: list[Answer], headers: dict[str, str] | None) -> None:
        with self.another() as wire:
            answers.append(small(wire, headers))


def small(wire: Wire, headers: dict[str, str] | None = None) -> Answer:
    content = {"Content-Type": MSGPACK, **(headers or {})}
    return wire.request("POST", FORWARD, packed(forward(), *BODY), content)


def is_right(answer: Answer) -> bool:
    return answer.status == 200 and np.array_equal(answer.array("y"), X @ WEIGHT.T)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Busy]:
    path = tmp_path / "s"
    options: dict[str, Any] = {"concurrency": 1, "queue_requests": QUEUE, "queue_bytes": 1 << 20}
    with running(path, device="cpu", **options):
        wire = Wire(path)
        service = Busy(path, wire)
        assert all(is_right(small(wire)) for _ in range(3))  # from the third on by a recording
        try:
            with unchanged(wire):
                yield service
                wait_for(lambda: service.requests()["admitted"] == 0)
                assert service.requests()["nbytes"] == 0
        finally:
            wire.close()


def refusal(answer: Answer, status: int, code: str) -> str:
    assert (answer.status, answer.header["code"]) == (status, code), answer
    return str(answer.header["detail"])


def test_what_does_not_fit_is_refused_and_all_else_is_right(busy: Busy) -> None:
    with busy.working(), busy.queued(QUEUE):
        answer = small(busy.wire)
        detail = refusal(answer, 429, "overloaded")
        assert detail == f"{QUEUE + 1} requests are being served, or wait; try later"
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        upload = busy.wire.request(
            "POST", f"{TENSORS}?dtype=float32&shape=1", bytes(4), {"Content-Type": OCTETS}
        )
        refusal(upload, 429, "overloaded")
        assert busy.requests()["refused"] == 2
    assert is_right(small(busy.wire))


def test_health_is_told_at_once_however_much_there_is_to_do(busy: Busy) -> None:
    with busy.working(), busy.queued(QUEUE):
        took = []
        for path in ("/health/live", "/health/ready", "/v1/info", TENSORS) * 5:
            began = time.perf_counter()
            assert busy.wire.request("GET", path).status == 200
            took.append(time.perf_counter() - began)
        assert busy.requests()["waiting"] == QUEUE
        assert sorted(took)[len(took) // 2] < 0.05


def test_a_body_for_which_there_is_no_room_is_never_read(busy: Busy) -> None:
    """Nor is what never comes waited for; and what comes nevertheless is dropped."""
    with busy.working(), holding(busy, 1 << 19):
        connection = UnixConnection(str(busy.path))
        body = packed(forward(), *BODY, bytes(1 << 20))
        connection.putrequest("POST", FORWARD)
        connection.putheader("Content-Type", MSGPACK)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        reply = connection.getresponse()  # not a byte of the body was sent
        document = msgpack.unpackb(reply.read())
        assert (reply.status, document["code"]) == (429, "overloaded")
        assert "bytes of requests are being served" in document["detail"]
        connection.send(body)
        connection.request("GET", "/health/live")
        assert connection.getresponse().read() == b'{"status": "live"}'
        connection.close()


def test_who_asks_whether_to_send_its_body_is_told_not_to(busy: Busy) -> None:
    with busy.working(), busy.queued(QUEUE):
        content = f"Content-Type: {MSGPACK}\r\nContent-Length: 99\r\nExpect: 100-continue\r\n"
        with talking(busy.path) as client:
            client.sendall(f"POST {FORWARD} HTTP/1.1\r\nHost: a\r\n{content}\r\n".encode())
            reply = read_all(client)
    assert reply.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nconnection: close\r\n" in reply


def test_a_body_of_unknown_length_is_refused_once_it_has_grown_too_much(busy: Busy) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(32):
            yield bytes(1 << 15)

    with busy.working(), holding(busy, 1 << 19):
        answer = busy.wire.request("POST", FORWARD, chunks(), {"Content-Type": MSGPACK})
        assert "bytes of requests" in refusal(answer, 429, "overloaded")


def test_a_body_over_the_service_s_limit_is_too_large_and_not_overload(busy: Busy) -> None:
    with busy.working(), holding(busy, 1 << 19):
        connection = UnixConnection(str(busy.path))
        connection.putrequest("POST", FORWARD)
        connection.putheader("Content-Type", MSGPACK)
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


def test_large_bodies_are_taken_one_at_a_time(busy: Busy) -> None:
    """Each is over what all may have together."""
    array = np.arange(1 << 19, dtype=np.float32)
    with Client(f"unix:{busy.path}") as client:
        held = client.put(array.reshape(1, -1))
        y = client.linear(array.reshape(1, -1) * 0, held)
        assert y == [[0]]


def test_a_deadline_that_passes_in_the_queue(busy: Busy) -> None:
    with busy.working():
        answer = small(busy.wire, {"X-Deadline-Ms": "50"})
        detail = refusal(answer, 504, "deadline_exceeded")
        assert detail == "the deadline passed before the work began; nothing was run"
        assert busy.requests()["working"] == 1
        assert busy.requests()["late"] == 1
    assert is_right(small(busy.wire, {"X-Deadline-Ms": "10000"}))


def test_a_deadline_that_passes_while_the_body_is_read(busy: Busy) -> None:
    def slow() -> Iterator[bytes]:
        time.sleep(0.1)
        yield packed(forward(), *BODY)

    headers = {"Content-Type": MSGPACK, "X-Deadline-Ms": "50"}
    refusal(busy.wire.request("POST", FORWARD, slow(), headers), 504, "deadline_exceeded")


def test_a_deadline_that_the_queue_makes_impossible_is_refused_unread(busy: Busy) -> None:
    with busy.working(), busy.queued(1):
        pass  # which is how the service learns how long that takes
    with busy.working(), busy.queued(QUEUE - 1), talking(busy.path) as client:
        head = f"Content-Type: {MSGPACK}\r\nContent-Length: 99\r\nX-Deadline-Ms: 1\r\n"
        client.sendall(f"POST {FORWARD} HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode())
        reply = client.recv(1 << 16)
    assert reply.startswith(b"HTTP/1.1 504 ")
    assert b"the deadline cannot be kept: 2 requests are before it" in reply


def test_interactive_requests_go_first(busy: Busy) -> None:
    order: list[str] = []

    def send(priority: str) -> None:
        with busy.another() as wire:
            assert is_right(small(wire, {"X-Priority": priority}))
            order.append(priority)

    with busy.working(), ThreadPoolExecutor(2) as pool:
        for count, priority in enumerate(("batch", "interactive"), 1):
            pool.submit(send, priority)
            wait_for(lambda count=count: busy.requests()["waiting"] == count)  # type: ignore[misc]
    assert sorted(order) == ["batch", "interactive"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("X-Priority", "high", "expected interactive or batch, got 'high'"),
        ("X-Priority", "Batch", "expected interactive or batch, got 'Batch'"),
        ("X-Deadline-Ms", "0", "expected an integer from 1 to 999999999, got '0'"),
        ("X-Deadline-Ms", "-5", "got '-5'"),
        ("X-Deadline-Ms", "1.5", "got '1.5'"),
        ("X-Deadline-Ms", "1e3", "got '1e3'"),
        ("X-Deadline-Ms", "9999999999", "got '9999999999'"),
        ("X-Deadline-Ms", "\u00b2", "got '\u00b2'"),
    ],
)
def test_headers_that_say_nothing(wire: Wire, name: str, value: str, says: str) -> None:
    headers = {name: value}
    body = packed(forward(), *BODY)
    refused_body(wire, FORWARD, body, "malformed", says=f"{name}: ... {says}", headers=headers)


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_headers_that_a_request_may_have(wire: Wire, priority: str) -> None:
    assert is_right(small(wire, {"X-Priority": priority, "X-Deadline-Ms": "000060000"}))


def test_who_hangs_up_in_the_queue_leaves_it_and_nothing_is_run(busy: Busy) -> None:
    header = forward(outputs={"y": "tensor"})
    body = packed(header, *BODY)
    with busy.working():
        with talking(busy.path) as client:
            head = f"Content-Type: {MSGPACK}\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"POST {FORWARD} HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode() + body)
            wait_for(lambda: busy.requests()["waiting"] == 1)
        wait_for(lambda: busy.requests()["waiting"] == 0)
        info = busy.requests()
        assert (info["admitted"], info["working"]) == (1, 1)


def test_an_overload_of_many_clients_loses_nothing(busy: Busy) -> None:
    """Every answer is the right one or a refusal, and the service is as before."""
    counts = {200: 0, 429: 0}
    lock = threading.Lock()

    def hammer() -> None:
        with busy.another() as wire:
            for _ in range(20):
                answer = small(wire)
                assert answer.status == 429 or is_right(answer)
                with lock:
                    counts[answer.status] += 1

    with busy.working(), ThreadPoolExecutor(16) as pool:
        for call in [pool.submit(hammer) for _ in range(16)]:
            call.result()
    assert counts[200] > 0
    assert counts[429] > 0
    assert sum(counts.values()) == 320


def test_the_client_raises_what_it_is_told(busy: Busy) -> None:
    with Client(f"unix:{busy.path}") as client, busy.working():
        with pytest.raises(DeadlineExceeded):
            client.linear(X, WEIGHT, deadline=0.05)
        with busy.queued(QUEUE), pytest.raises(Overloaded) as caught:
            client.linear(X, WEIGHT, priority="batch")
        assert caught.value.retry_after is not None
        assert caught.value.retry_after >= 1


@pytest.mark.parametrize(
    "send",
    [
        lambda client, **k: client.linear(X, WEIGHT, **k),
        lambda client, **k: client.linear_backward(WEIGHT, dz=X @ WEIGHT.T, **k).dx,
        lambda client, **k: client.matmul(X, WEIGHT.T, **k),
    ],
)
def test_operations_may_have_deadline_and_priority(
    client: Client, send: Callable[..., Any]
) -> None:
    expected = send(client)
    assert np.array_equal(send(client, deadline=60.0, priority="batch"), expected)


@contextmanager
def holding(busy: Busy, nbytes: int) -> Iterator[None]:
    """A request in the queue with a body of about so many bytes."""
    x = np.ones((nbytes // 16, 4), np.float32)
    weight = np.ones((1, 4), np.float32)
    header = {"x": tensor(x, 0), "weight": tensor(weight, 1)}
    with busy.another() as wire, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(wire.send, FORWARD, header, raw(x), raw(weight))
        wait_for(lambda: busy.requests()["waiting"] == 1)
        yield
        assert waits.result().status == 200


@contextmanager
def talking(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        yield client


def read_all(client: socket.socket) -> bytes:
    """What comes until the service closes the connection."""
    received = b""
    while part := client.recv(1 << 16):
        received += part
    return received
