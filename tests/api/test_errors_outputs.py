"""Outputs that cannot go where they are to: targets keep their contents, tapes are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ..local import Wire, raw, tensor
from ..reference import Host
from .refusals import (
    BACKWARD,
    BODY,
    FORWARD,
    MATMUL,
    MLP_BACKWARD,
    MLP_FORWARD,
    TENSORS,
    WEIGHT,
    X,
    forward,
    refused_header,
)

DZ = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32)
"""Square, so that every gradient of a square layer fits every target."""


@pytest.fixture
def target(wire: Wire) -> Iterator[str]:
    """A tensor like `DZ`, which must not have been written to."""
    handle = wire.hold(DZ)
    yield handle
    answer = wire.get(f"{TENSORS}/{handle}/metadata")
    assert (answer["version"], answer["shape"]) == (1, [3, 3])
    wire.request("DELETE", f"{TENSORS}/{handle}")


@pytest.fixture
def tape(wire: Wire) -> Iterator[str]:
    """Of two square layers, the second without a bias; it must not have been consumed."""
    layers = [{"weight": tensor(DZ, 0), "bias": tensor(DZ[0], 1)}, {"weight": tensor(DZ, 0)}]
    header = {"x": tensor(DZ, 0), "layers": layers, "save_tape": True}
    handle = wire.send(MLP_FORWARD, header, raw(DZ), raw(DZ[0])).header["tape"]["tensor"]
    yield handle
    answer = wire.send(MLP_BACKWARD, {"tape": handle, "dy": tensor(DZ, 0)}, raw(DZ))
    assert answer.status == 200, answer.header


def with_target(header: Any, handle: str) -> Any:
    """`header` with `handle` for every "TARGET"."""
    if isinstance(header, dict):
        return {name: with_target(part, handle) for name, part in header.items()}
    if isinstance(header, list):
        return [with_target(part, handle) for part in header]
    return handle if header == "TARGET" else header


BATCH_OF_2 = {"x": tensor(X, 0), "weight": tensor(WEIGHT, 1)}
SQUARE = {"x": tensor(DZ, 0), "weight": tensor(DZ, 0)}
GRADIENT = {"dz": tensor(DZ, 0), "x": tensor(DZ, 0), "weight": tensor(DZ, 0)}
PRODUCT = {"a": tensor(DZ, 0), "b": tensor(DZ, 0)}
INTO: dict[str, Any] = {"tensor": "TARGET"}


@pytest.mark.parametrize(
    ("path", "header", "operand", "says"),
    [
        (
            FORWARD,
            {"x": tensor(DZ[:2], 0), "weight": tensor(DZ, 1), "outputs": {"y": INTO}},
            "outputs.y",
            "outputs.y: expected a tensor [2, 3] of float32, TARGET is [3, 3] of float32",
        ),
        (
            FORWARD,
            {
                "x": tensor(DZ.astype(np.float64), 0),
                "weight": tensor(DZ.astype(np.float64), 0),
                "outputs": {"y": INTO},
            },
            "outputs.y",
            "outputs.y: expected a tensor [3, 3] of float64, TARGET is [3, 3] of float32",
        ),
        (
            BACKWARD,
            GRADIENT | {"outputs": {"dbias": INTO}},
            "outputs.dbias",
            "outputs.dbias: expected a tensor [3] of float32, TARGET is [3, 3] of float32",
        ),
        (
            BACKWARD,
            GRADIENT | {"outputs": {"dx": INTO, "dweight": INTO}},
            "outputs.dweight",
            "outputs.dweight: expected a tensor of its own, TARGET takes another output",
        ),
        (
            FORWARD,
            SQUARE | {"outputs": {"y": INTO | {"alpha": 2.0}}},
            "outputs.y",
            "outputs.y: alpha and beta are for dweight and dbias",
        ),
        (
            FORWARD,
            SQUARE | {"outputs": {"y": INTO | {"beta": 1.0}}},
            "outputs.y",
            "outputs.y: alpha and beta are for dweight and dbias",
        ),
        (
            BACKWARD,
            GRADIENT | {"outputs": {"dx": INTO | {"beta": 1.0}}},
            "outputs.dx",
            "outputs.dx: alpha and beta are for dweight and dbias",
        ),
        (
            BACKWARD,
            GRADIENT | {"wants": ["dbias"], "outputs": {"dweight": INTO}},
            "outputs.dweight",
            "outputs.dweight: expected an output of this request, which are ['dbias']",
        ),
        (
            FORWARD,
            SQUARE | {"activation": "relu", "save_aux": True, "outputs": {"aux": INTO}},
            "outputs.aux",
            "outputs.aux: expected payload or tensor",
        ),
        (
            FORWARD,
            SQUARE | {"activation": "relu", "outputs": {"aux": "tensor", "y": INTO}},
            "outputs.aux",
            "outputs.aux: expected save_aux with it",
        ),
        (
            MATMUL,
            PRODUCT | {"outputs": {"d": INTO | {"alpha": 2.0}}},
            "outputs.d",
            "outputs.d: alpha and beta are for dweight and dbias",
        ),
        (
            MATMUL,
            PRODUCT | {"epilog": "RELU_AUX", "outputs": {"relu_aux": INTO}},
            "outputs.relu_aux",
            "outputs.relu_aux: expected payload or tensor, got a handle",
        ),
        (
            MATMUL,
            PRODUCT | {"outputs": {"bgrada": INTO}},
            "outputs",
            "outputs.bgrada: expected one of d with epilog NONE",
        ),
        (
            MLP_FORWARD,
            {
                "x": tensor(DZ, 0),
                "layers": [{"weight": tensor(DZ, 0)}],
                "outputs": {"y": INTO | {"beta": 0.5}},
            },
            "outputs.y",
            "outputs.y: alpha and beta are for dweight and dbias",
        ),
    ],
)
def test_placements(
    wire: Wire, target: str, path: str, header: dict[str, Any], operand: str, says: str
) -> None:
    x = header.get("x", header.get("a", {}))
    payloads = [np.zeros(x["shape"], x["dtype"])]
    if "'payload': 1" in str(header):
        payloads.append(DZ)
    refused_header(
        wire,
        path,
        with_target(header, target),
        *map(raw, payloads),
        code="invalid_operands",
        operand=operand,
        says=says.replace("TARGET", target),
    )


def test_a_result_that_no_payload_can_hold(wire: Wire) -> None:
    column = np.zeros((1 << 15, 1), np.float32)
    header = {"x": tensor(column, 0), "weight": tensor(column, 0)}
    refused_header(
        wire,
        FORWARD,
        header,
        raw(column),
        code="invalid_operands",
        operand="outputs.y",
        says="outputs.y: expected a tensor for 4294967296 bytes, "
        "a payload of this reply has at most 4294967295",
    )


@pytest.mark.parametrize("kind", ["relu_aux", "tape"])
def test_targets_that_are_no_tensors(wire: Wire, kind: str) -> None:
    if kind == "relu_aux":
        header = forward(activation="relu", save_aux=True)
        handle = wire.send(FORWARD, header, *BODY).header["aux"]["tensor"]
    else:
        header = {"x": tensor(X, 0), "layers": [{"weight": tensor(WEIGHT, 1)}], "save_tape": True}
        handle = wire.send(MLP_FORWARD, header, *BODY).header["tape"]["tensor"]
    refused_header(
        wire,
        FORWARD,
        forward(outputs={"y": {"tensor": handle}}),
        *BODY,
        code="conflict",
        operand="outputs.y",
        says=f"outputs.y: expected a tensor to write to, {handle} is a {kind}",
    )
    assert wire.request("DELETE", f"{TENSORS}/{handle}").status == 204


@pytest.mark.parametrize(
    ("changes", "operand", "says", "code"),
    [
        ({"dy": None}, "dy", "expected either dy or dz", "malformed"),
        ({"dz": tensor(DZ, 0)}, "dy", "expected either dy or dz", "malformed"),
        ({"wants": []}, "wants", "expected at least one of", "malformed"),
        (
            {"dy": tensor(DZ[:2], 0)},
            "dy",
            "expected shape (3, 3) ... got (2, 3)",
            "invalid_operands",
        ),
        ({"dy": tensor(DZ[0], 0)}, "dy", "expected shape (3, 3) ... got (3,)", "invalid_operands"),
        (
            {"dy": tensor(DZ.astype(np.float16), 0)},
            "dy",
            "float32 ... got float16",
            "invalid_operands",
        ),
        ({"layers": [{}]}, "layers", "expected 2 entries ... got 1", "invalid_operands"),
        ({"layers": [{}, {}, {}]}, "layers", "expected 2 entries ... got 3", "invalid_operands"),
        (
            {"layers": [{}, {"dbias": "tensor"}]},
            "layers[1].dbias",
            "expected one of ['dweight'], got dbias",
            "invalid_operands",
        ),
        (
            {"wants": ["dx"], "layers": [{"dweight": "tensor"}, {}]},
            "layers[0].dweight",
            "expected one of [], got dweight",
            "invalid_operands",
        ),
        (
            {"layers": [{"dbias": INTO}, {}]},
            "layers[0].dbias",
            "expected a tensor [3] of float32, TARGET is [3, 3]",
            "invalid_operands",
        ),
        (
            {"layers": [{"dweight": INTO}, {"dweight": INTO}]},
            "layers[1].dweight",
            "expected a tensor of its own",
            "invalid_operands",
        ),
        ({"outputs": {"dx": INTO}}, "outputs.dx", "expected with dx in wants", "invalid_operands"),
        (
            {"wants": ["dx"], "outputs": {"dx": INTO | {"beta": 1.0}}},
            "outputs.dx",
            "alpha and beta are for dweight and dbias",
            "invalid_operands",
        ),
    ],
)
def test_a_refused_backward_pass_keeps_its_tape(
    wire: Wire,
    tape: str,
    target: str,
    changes: dict[str, Any],
    operand: str,
    says: str,
    code: str,
) -> None:
    header = with_target({"tape": tape, "dy": tensor(DZ, 0), **changes}, target)
    dy: Host = DZ
    if header["dy"] is None:
        del header["dy"]
    else:
        dy = np.zeros(header["dy"]["shape"], header["dy"]["dtype"])
    payloads = [raw(dy)] if "dy" in header else []
    refused_header(
        wire,
        MLP_BACKWARD,
        header,
        *payloads,
        code=code,
        operand=operand,
        says=f"{operand}: ... {says.replace('TARGET', target)}",
    )
