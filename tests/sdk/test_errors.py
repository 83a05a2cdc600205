"""Answers that are problems become exceptions, one class for each code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from matmuld_client import (
    Client,
    Draining,
    InvalidOperands,
    MatmuldError,
    Overloaded,
    RequestError,
    TooLarge,
    TransportError,
)
from matmuld_client.errors import BY_CODE

from ..api.refusals import STATUS
from .loopback import Peer, Serve, loopback

X = np.zeros((2, 3), np.float32)


def answering(body: bytes, status: int, kind: str) -> Serve:
    def serve(peer: Peer) -> None:
        while peer.request() is not None:
            peer.reply(body, status, kind)

    return serve


def raised_by(serve: Serve) -> Exception:
    with loopback(serve) as server, Client(server.url) as client:
        with pytest.raises(MatmuldError) as caught:
            client.linear(X, X)
        return caught.value


PACKERS: dict[str, Callable[[object], bytes]] = {
    "application/problem+json": lambda problem: json.dumps(problem).encode(),
    "application/problem+msgpack": msgpack.packb,
}


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("code", BY_CODE)
def test_a_problem_is_raised_as_the_class_of_its_code(code: str, kind: str) -> None:
    sent = BY_CODE[code]("expected (3,), got (4,)", operand="bias")
    error = raised_by(answering(PACKERS[kind](sent.problem("r-1")), sent.status, kind))
    assert type(error) is BY_CODE[code]
    assert isinstance(error, RequestError)
    assert (error.detail, error.operand, error.request_id) == (sent.detail, "bias", "r-1")


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("Retry-After: 7\r\n", 7),
        ("", None),
        ("Retry-After: Mon, 30 Nov 2026 22:00:00 GMT\r\n", None),
    ],
)
def test_when_to_try_again_is_told(said: str, seconds: int | None) -> None:
    body = msgpack.packb(Overloaded("too many requests").problem("r-1"))

    def serve(peer: Peer) -> None:
        peer.request()
        peer.reply(body, 429, "application/problem+msgpack", said)

    error = raised_by(serve)
    assert isinstance(error, Overloaded)
    assert error.retry_after == seconds


def test_every_code_of_the_protocol_has_a_class() -> None:
    never_seen = {"internal": 500, "starting": 503, "draining": 503, "device_lost": 503}
    assert {code: error.status for code, error in BY_CODE.items()} == STATUS | never_seen


NO_PROBLEMS = {
    "unknown code": (b'{"code": "teapot", "detail": "short"}', 418, "status 418, teapot: short"),
    "a proxy's page": (b"<html>Bad Gateway</html>", 502, "status 502, no code: <html>Bad Gateway"),
    "a list": (b"[1, 2]", 500, "status 500, no code: [1, 2]"),
    "nothing": (b"", 500, "status 500, no code: "),
    "no text": (b"\xff\xfe", 500, "status 500, no code: "),
    "a redirect": (b"moved", 307, "status 307, no code: moved"),
}


@pytest.mark.parametrize(("body", "status", "message"), NO_PROBLEMS.values(), ids=NO_PROBLEMS)
def test_other_answers_are_request_errors_that_quote_them(
    body: bytes, status: int, message: str
) -> None:
    error = raised_by(answering(body, status, "application/json"))
    assert type(error) is RequestError
    assert str(error).startswith(message)


def test_a_reply_that_is_not_framed_is_a_transport_error() -> None:
    assert type(raised_by(answering(b"\x93\x01\x02", 200, "application/msgpack"))) is TransportError


def test_a_body_refused_unread_is_its_error_and_no_broken_pipe() -> None:
    def refuse(peer: Peer) -> None:
        peer.head()
        peer.reply(msgpack.packb(TooLarge("64 MiB allowed").problem("r")), 413)

    with (
        loopback(refuse) as server,
        Client(server.url) as client,
        pytest.raises(TooLarge, match="64 MiB allowed"),
    ):
        client.put(np.zeros(16 << 20, np.float16))


def test_health_is_yes_or_no() -> None:
    draining = json.dumps(Draining("stopping").problem("r")).encode()
    serve = answering(draining, 503, "application/problem+json")
    with loopback(serve) as server, Client(server.url) as client:
        assert (client.live(), client.ready()) == (False, False)
    with Client(server.url) as client:  # nobody is there
        assert (client.live(), client.ready()) == (False, False)


def test_deadline_and_priority_are_said_in_headers() -> None:
    body = msgpack.packb({"y": {"dtype": "float32", "shape": [0, 2], "payload": 0}})

    def serve(peer: Peer) -> None:
        while peer.request() is not None:
            peer.reply(body + b"\xc4\x00")

    with loopback(serve) as server, Client(server.url) as client:
        client.linear(X[:0], X)
        client.linear(X[:0], X, deadline=0.0254, priority="batch")
    plain, urgent = (request.fields for request in server.requests)
    assert not {"x-deadline-ms", "x-priority"} & set(plain)
    assert (urgent["x-deadline-ms"], urgent["x-priority"]) == ("25", "batch")


@pytest.mark.parametrize("deadline", [0, -1.0, 1e-4, 1e6, float("nan"), float("inf")])
def test_a_deadline_that_cannot_be_meant(deadline: float) -> None:
    with Client("unix:/nowhere") as client, pytest.raises(ValueError, match="deadline: expected"):
        client.linear(X, X, deadline=deadline)


def test_a_priority_that_there_is_not() -> None:
    urgent: Any = "urgent"
    says = "priority: expected 'interactive' or 'batch', got 'urgent'"
    with Client("unix:/nowhere") as client, pytest.raises(ValueError, match=says):
        client.linear(X, X, priority=urgent)


def test_operands_that_cannot_be_sent_are_refused_by_name() -> None:
    with Client("unix:/nowhere") as client, pytest.raises(InvalidOperands) as caught:
        client.linear(X, X, np.zeros(2, np.int32))
    assert caught.value.operand == "bias"
