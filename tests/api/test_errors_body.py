"""Bodies that are not what the protocol says: 400 malformed."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from ..local import Wire, packed, raw, tensor
from .refusals import (
    BACKWARD,
    BODY,
    FORWARD,
    JSON,
    MATMUL,
    MLP_BACKWARD,
    MLP_FORWARD,
    TENSORS,
    WARM,
    WEIGHT,
    X,
    forward,
    refused_body,
    refused_header,
)


def test_truncated_at_every_byte(wire: Wire) -> None:
    body = packed(forward(), *BODY)
    for end in range(len(body)):
        refused_body(wire, FORWARD, body[:end], "malformed", *_truncation(end))


def _truncation(end: int) -> tuple[str | None, str]:
    """What is at fault if only `end` bytes of the body come."""
    header = len(msgpack.packb(forward()))
    first = header + 2 + len(BODY[0])
    if end < header:
        return None, "the header is truncated"
    if end == header:
        return "x", "expected a payload index below 0, got 0"
    if end == first:
        return "weight", "expected a payload index below 1, got 1"
    at = header if end < first else first
    if end == at + 1:
        return None, f"byte {at}: the length of a payload is truncated"
    payload, number = (BODY[0], 0) if at == header else (BODY[1], 1)
    return None, (
        f"payload {number} is truncated: {len(payload)} bytes declared, {end - at - 2} came"
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (b"\0", "byte {end}: expected a bin object, got type byte 0x00"),
        (b"\x80", "byte {end}: expected a bin object, got type byte 0x80"),
        (b"\xc4", "byte {end}: the length of a payload is truncated"),
        (b"\xc4\x00", "payload 2: expected a tensor that names it, there is none"),
        (b"\xc6\xff\xff\xff\xff", "payload 2 is truncated: 4294967295 bytes declared, 0 came"),
    ],
)
def test_trailing_bytes(wire: Wire, extra: bytes, says: str) -> None:
    body = packed(forward(), *BODY)
    refused_body(
        wire, FORWARD, body + extra, "malformed", says=says.replace("{end}", str(len(body)))
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the header is truncated"),
        (b"\xc1", "the header is not MessagePack"),
        (msgpack.packb([1, 2]), "the header must be a map, got list"),
        (msgpack.packb("x"), "the header must be a map, got str"),
        (msgpack.packb({1: 2}), "int is not allowed for map key"),
        (b"\x81\xa1\xff\x01", "the header is not MessagePack"),
        (b"\x81\xa1x\xdd\xff\xff\xff\xff", "the header is not MessagePack"),
        (msgpack.packb({"x": "a" * (1 << 20)}), "the header is over 1 MiB"),
    ],
    ids=["empty", "never", "list", "string", "int key", "not UTF-8", "4 Gi elements", "over 1 MiB"],
)
def test_no_header(wire: Wire, body: bytes, says: str) -> None:
    refused_body(wire, FORWARD, body, "malformed", says=says)


@pytest.mark.parametrize(
    ("path", "header", "operand", "says"),
    [
        (FORWARD, forward(weigth=1), "weigth", "weigth: unknown field, got 1"),
        (FORWARD, forward(x=tensor(X, 0, order="F")), "x", "x.order: unknown field, got 'F'"),
        (FORWARD, forward(options={"speed": 9}), "options.speed", "options.speed: unknown field"),
        (FORWARD, forward(outputs={"z": "tensor"}), "outputs.z", "expected 'y' or 'aux', got 'z'"),
        (
            FORWARD,
            forward(outputs={"y": {"tensor": "h", "gamma": 1}}),
            "outputs.y",
            "outputs.y.gamma: unknown field, got 1",
        ),
        (
            MLP_FORWARD,
            {"x": tensor(X, 0), "layers": [{"weight": tensor(WEIGHT, 1), "bais": 0}]},
            "layers[0].bais",
            "layers[0].bais: unknown field, got 0",
        ),
        (BACKWARD, {"dz": tensor(X, 0), "dw": 1}, "dw", "dw: unknown field"),
        (MLP_BACKWARD, {"tape": "t", "keep": 1}, "keep", "keep: unknown field"),
        (MATMUL, {"a": tensor(X, 0), "b": tensor(X, 1), "d": 1}, "d", "d: unknown field"),
        (TENSORS, {"dtype": "float32", "shape": [1], "name": "w"}, "name", "name: unknown field"),
        (WARM, {"requests": [], "plans": []}, "plans", "plans: unknown field, got []"),
    ],
)
def test_unknown_fields(
    wire: Wire, path: str, header: dict[str, Any], operand: str, says: str
) -> None:
    refused_header(wire, path, header, *BODY, code="malformed", operand=operand, says=says)


@pytest.mark.parametrize(
    ("path", "header", "operand", "says"),
    [
        (FORWARD, forward(x=None), "x", "expected a map, got None"),
        (FORWARD, forward(x=5), "x", "expected a map, got 5"),
        (FORWARD, forward(x=[1.0]), "x", "expected a map, got [1.0]"),
        (FORWARD, forward(x=b"abc"), "x", "expected a map, got b'abc'"),
        (FORWARD, forward(x=tensor(X, 0, dtype=4)), "x", "x.dtype: expected a valid string, got 4"),
        (FORWARD, forward(x=tensor(X, 0, shape="2,3")), "x", "x.shape: ... valid list, got '2,3'"),
        (
            FORWARD,
            forward(x=tensor(X, 0, shape=[2, "3"])),
            "x",
            "x.shape[1]: ... valid integer, got '3'",
        ),
        (FORWARD, forward(x=tensor(X, 0, shape=[2, 3.0])), "x", "x.shape[1]: ... integer, got 3.0"),
        (
            FORWARD,
            forward(x=tensor(X, 0, shape=[2, True])),
            "x",
            "x.shape[1]: ... integer, got True",
        ),
        (FORWARD, forward(x=tensor(X, 0, strides=7)), "x", "x.strides: ... valid list, got 7"),
        (
            FORWARD,
            forward(x=tensor(X, 0) | {"payload": "0"}),
            "x",
            "x.payload: ... valid integer, got '0'",
        ),
        (FORWARD, forward(x={"tensor": 7}), "x", "x.tensor: ... valid string, got 7"),
        (
            FORWARD,
            forward(x=tensor(X, 0, kind="tape")),
            "x",
            "x.kind: ... 'silu_aux' or 'leaky_relu_aux', got 'tape'",
        ),
        (FORWARD, forward(alpha="2"), "alpha", "alpha: expected a valid number, got '2'"),
        (FORWARD, forward(activation=1), "activation", "expected a valid string, got 1"),
        (FORWARD, forward(save_aux=1), "save_aux", "expected a valid boolean, got 1"),
        (FORWARD, forward(outputs=[]), "outputs", "expected a valid dictionary, got []"),
        (FORWARD, forward(outputs={"y": "disk"}), "outputs.y", "'payload' or 'tensor', got 'disk'"),
        (FORWARD, forward(outputs={"y": {"tensor": 3}}), "outputs.y", "valid string, got 3"),
        (
            FORWARD,
            forward(options={"sm_count_target": -1}),
            "options.sm_count_target",
            "greater than or equal to 0, got -1",
        ),
        (BACKWARD, {"dz": tensor(X, 0), "wants": "dx"}, "wants", "expected a valid list, got 'dx'"),
        (
            BACKWARD,
            {"dz": tensor(X, 0), "wants": ["dy"]},
            "wants",
            "'dx', 'dweight' or 'dbias', got 'dy'",
        ),
        (MLP_FORWARD, {"x": tensor(X, 0), "layers": {}}, "layers", "expected a valid list, got {}"),
        (MLP_FORWARD, {"x": tensor(X, 0), "layers": []}, "layers", "at least 1 item ... got []"),
        (MLP_BACKWARD, {"tape": {"tensor": "t"}}, "tape", "tape.step: expected, is missing"),
        (TENSORS, {"dtype": "float32", "shape": [1], "ttl_s": 0}, "ttl_s", "greater than 0, got 0"),
        (
            TENSORS,
            {"dtype": "float32", "shape": [1], "ttl_s": float("inf")},
            "ttl_s",
            "finite number",
        ),
        (
            TENSORS,
            {"dtype": "float32", "shape": [1], "pinned": "yes"},
            "pinned",
            "boolean, got 'yes'",
        ),
        (
            WARM,
            {"requests": [{"operation": "sum", "header": {}}]},
            "requests",
            "'matmul' or 'run', got 'sum'",
        ),
    ],
)
def test_wrong_types(
    wire: Wire, path: str, header: dict[str, Any], operand: str, says: str
) -> None:
    refused_header(wire, path, header, *BODY, code="malformed", operand=operand, says=says)


@pytest.mark.parametrize(
    ("path", "header", "operand"),
    [
        (FORWARD, {"x": tensor(X, 0)}, "weight"),
        (FORWARD, forward(x={"shape": [2, 3], "payload": 0}), "x"),
        (FORWARD, forward(x={"dtype": "float32", "payload": 0}), "x"),
        (MLP_FORWARD, {"x": tensor(X, 0), "layers": [{}]}, "layers[0].weight"),
        (MLP_BACKWARD, {"dz": tensor(X, 0)}, "tape"),
        (MATMUL, {"a": tensor(X, 0)}, "b"),
        (BACKWARD, {"dz": tensor(X, 0), "wants": ["dx"]}, "weight"),
        (BACKWARD, {"dz": tensor(X, 0), "wants": ["dweight"]}, "x"),
        (BACKWARD, {"dz": tensor(X, 0), "input_dbias": True, "weight": tensor(X, 1)}, "input_aux"),
        (TENSORS, {"dtype": "float32"}, "tensor"),
        (TENSORS, {"shape": [1]}, "tensor"),
    ],
)
def test_what_is_missing(wire: Wire, path: str, header: dict[str, Any], operand: str) -> None:
    payloads = [raw(X)] * str(header).count("payload")
    refused_header(
        wire,
        path,
        header,
        *payloads,
        code="malformed",
        operand=operand,
        says="expected ... missing",
    )


@pytest.mark.parametrize("depth", [20, 500, 990, 1010, 1023, 5000, 1 << 19])
@pytest.mark.parametrize("form", ["msgpack list", "msgpack map", "JSON list", "JSON map"])
@pytest.mark.parametrize("path", [FORWARD, WARM])
def test_deep_nesting(wire: Wire, path: str, form: str, depth: int) -> None:
    before, opened, closed = {
        "msgpack list": (b"\x81\xa1x", b"\x91", b""),
        "msgpack map": (b"", b"\x81\xa1x", b""),
        "JSON list": (b'{"x":', b"[", b"]"),
        "JSON map": (b"", b'{"x":', b"}"),
    }[form]
    after = b"\x90" if "msgpack" in form else b"0" * form.endswith("map")
    body = before + opened * depth + after + closed * depth + b"}" * (form == "JSON list")
    media = "application/msgpack" if "msgpack" in form else JSON
    answer = wire.request("POST", path, body, {"Content-Type": media})
    operand = answer.header.get("operand")
    assert operand in (None, "x", "weight", "requests")
    refused_body(wire, path, body, "malformed", operand, form=media)


@pytest.mark.parametrize("index", [-1, 2, 1 << 31, 1 << 63])
def test_a_payload_that_is_not_there(wire: Wire, index: int) -> None:
    refused_header(
        wire,
        FORWARD,
        forward(weight=tensor(WEIGHT, index)),
        *BODY,
        code="malformed",
        operand="weight",
        says=f"weight: expected a payload index below 2, got {index}",
    )


def test_a_payload_that_nothing_names(wire: Wire) -> None:
    header = forward(x=tensor(WEIGHT, 1))
    says = "payload 0: expected a tensor that names it, there is none"
    refused_header(wire, FORWARD, header, *BODY, code="malformed", says=says)
    refused_header(
        wire, TENSORS, {"dtype": "float32", "shape": [1]}, b"", code="malformed", says=says
    )


def test_one_payload_may_be_two_operands(wire: Wire) -> None:
    square = np.array([[1, 2], [3, 4]], np.float32)
    header = {"x": tensor(square, 0), "weight": tensor(square, 0)}
    answer = wire.send(FORWARD, header, raw(square))
    assert np.array_equal(answer.array("y"), square @ square.T)


@pytest.mark.parametrize(
    ("sources", "came"),
    [
        ({}, "none"),
        ({"payload": 0, "tensor": "h"}, "payload and tensor"),
        ({"payload": 0, "data": ""}, "payload and data"),
        ({"payload": 0, "data": "", "tensor": "h"}, "payload and data and tensor"),
    ],
)
def test_other_than_one_source(wire: Wire, sources: dict[str, Any], came: str) -> None:
    x = {"dtype": "float32", "shape": [2, 3], **sources}
    says = f"x: expected exactly one source, got {came}"
    header = forward(x=x)
    refused_header(wire, FORWARD, header, *BODY, code="malformed", operand="x", says=says)


def test_a_source_where_only_a_description_is_due(wire: Wire) -> None:
    header = {"requests": [{"operation": "linear/forward", "header": forward()}]}
    says = "x: expected no payload or data, got payload"
    refused_header(wire, WARM, header, code="malformed", operand="x", says=says)
