"""Requests that must be refused: the exact problem, nothing left behind, the connection goes on."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..local import MSGPACK, Answer, Wire, raw, tensor
from ..reference import Host

FORWARD, BACKWARD = "/v1/linear/forward", "/v1/linear/backward"
MLP_FORWARD, MLP_BACKWARD = "/v1/mlp/forward", "/v1/mlp/backward"
MATMUL, TENSORS, WARM = "/v1/matmul", "/v1/tensors", "/v1/plans/warm"
JSON, OCTETS = "application/json", "application/octet-stream"

STATUS = {
    "malformed": 400,
    "unknown_handle": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "conflict": 409,
    "gone": 410,
    "length_required": 411,
    "too_large": 413,
    "unsupported_media_type": 415,
    "invalid_operands": 422,
    "overloaded": 429,
    "deadline_exceeded": 504,
    "out_of_memory": 507,
}

X = np.array([[1, 2, 3], [-4, 5, -6]], np.float32)
WEIGHT = np.array([[1, 0, 2], [0, 1, -1], [3, 1, 0], [-2, 0, 1]], np.float32)
BODY = (raw(X), raw(WEIGHT))


def forward(**changes: Any) -> dict[str, Any]:
    """The header of a valid ``x·weightᵀ`` with payloads `BODY`, but for what is changed."""
    return {"x": tensor(X, 0), "weight": tensor(WEIGHT, 1), **changes}


def footprint(wire: Wire) -> dict[str, int]:
    """What a request could leave behind."""
    info = wire.get("/v1/info")
    return {
        "tensors": info["tensors"]["count"],
        "bytes": info["tensors"]["nbytes"],
        "used": info["memory"]["used_bytes"],
        "leased": info["plans"]["leased"],
    }


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextmanager
def unchanged(wire: Wire) -> Iterator[None]:
    """Fails if the service holds anything more or less at the end than at the beginning.

    Memory may go a moment after the reply, so it is looked at for a while.
    """
    before = footprint(wire)
    yield
    deadline = time.monotonic() + 5
    while (after := footprint(wire)) != before and time.monotonic() < deadline:
        gc.collect()
    assert after == before


def refused(
    wire: Wire, request: Callable[[], Answer], code: str, operand: str | None = None, says: str = ""
) -> None:
    """`request` is answered with that problem and leaves nothing behind; the connection goes on.

    `says` are parts of the detail in their order, with `` ... `` between them.
    """
    with unchanged(wire):
        connection = wire._connection.sock
        answer = request()
    document = answer.header
    assert (answer.status, document.get("code")) == (STATUS[code], code), document
    assert document["status"] == answer.status
    assert document["type"] == f"urn:matmuld:{code}"
    assert document.get("operand") == operand, document
    assert document["request_id"] == answer.headers["x-request-id"]
    detail, at = document["detail"], 0
    assert operand is None or operand in detail, document
    for part in says.split(" ... "):
        assert part in detail[at:], document
        at = detail.index(part, at) + len(part)
    assert works(wire)
    assert wire._connection.sock is connection, "the connection was closed"


def refused_header(
    wire: Wire,
    path: str,
    header: object,
    *payloads: bytes,
    code: str,
    operand: str | None = None,
    says: str = "",
    method: str = "POST",
) -> None:
    """`refused` of a MessagePack request."""

    def request() -> Answer:
        return wire.send(path, header, *payloads, method=method)

    refused(wire, request, code, operand, says)


def refused_body(
    wire: Wire,
    path: str,
    body: bytes | None,
    code: str,
    operand: str | None = None,
    says: str = "",
    *,
    form: str = MSGPACK,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> None:
    """`refused` of any bytes at all."""

    def request() -> Answer:
        return wire.request(method, path, body, {"Content-Type": form, **(headers or {})})

    refused(wire, request, code, operand, says)


def described(*shape: int, dtype: str = "float32", payload: int = 0, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "payload": payload, **more}


def zeros(*shape: int, dtype: Any = np.float32) -> Host:
    return np.zeros(shape, dtype)


def invalid(
    wire: Wire, path: str, header: dict[str, Any], *arrays: Host, operand: str, says: str
) -> None:
    payloads = [raw(array) for array in arrays]
    refused_header(
        wire, path, header, *payloads, code="invalid_operands", operand=operand, says=says
    )


def works(wire: Wire) -> bool:
    """Whether a valid request is answered as it should be."""
    answer = wire.send(FORWARD, forward(), *BODY)
    return answer.status == 200 and np.array_equal(answer.array("y"), X @ WEIGHT.T)
