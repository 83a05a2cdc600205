"""Auxiliary data of another shape, kind, epilog or layer than the gradient it is given with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ..local import Wire, raw, tensor
from ..reference import ACTIVATIONS, pack_mask
from .refusals import BACKWARD, BODY, FORWARD, MATMUL, TENSORS, WEIGHT, X, refused_header

DY = np.ones((2, 4), np.float32)
KINDS = "relu_aux, gelu_aux, gelu_erf_aux, silu_aux or leaky_relu_aux"


@pytest.fixture
def auxes(wire: Wire) -> Iterator[dict[str, str]]:
    """Handles of an aux of each kind, of 4 outputs and a batch of 2."""
    handles = {}
    for activation in ACTIVATIONS:
        header = {"x": tensor(X, 0), "weight": tensor(WEIGHT, 1), "activation": activation}
        answer = wire.send(FORWARD, {**header, "save_aux": True}, *BODY)
        handles[f"{activation}_aux"] = answer.header["aux"]["tensor"]
    yield handles
    for handle in handles.values():
        wire.request("DELETE", f"{TENSORS}/{handle}")


def test_a_mask_where_numbers_are_due(wire: Wire, auxes: dict[str, str]) -> None:
    header = {"x": {"tensor": auxes["relu_aux"]}, "weight": tensor(DY, 0)}
    says = "x: expected dtype float64 or float32 or ... or float8_e5m2, the tensor has uint8"
    refused_header(wire, FORWARD, header, raw(DY), code="invalid_operands", operand="x", says=says)


@pytest.mark.parametrize("kind", [f"{name}_aux" for name in ACTIVATIONS])
@pytest.mark.parametrize(
    ("batch", "outputs", "looks"),
    [(3, 4, "of 4 rows and 3 columns"), (1, 4, "of 4 rows and 1 columns"), (2, 200, "of 200 rows")],
)
def test_an_aux_of_another_shape(
    wire: Wire, auxes: dict[str, str], kind: str, batch: int, outputs: int, looks: str
) -> None:
    dy = np.ones((batch, outputs), np.float32)
    header = {"dy": tensor(dy, 0), "aux": {"tensor": auxes[kind]}}
    says = f"aux: expected shape ... ({kind} {looks} ... got ("
    refused_header(
        wire, BACKWARD, header, raw(dy), code="invalid_operands", operand="aux", says=says
    )


@pytest.mark.parametrize("kind", [f"{name}_aux" for name in ACTIVATIONS])
def test_an_aux_of_other_rows_within_the_same_padding(
    wire: Wire, auxes: dict[str, str], kind: str
) -> None:
    dy = np.ones((2, 5), np.float32)
    header = {"dy": tensor(dy, 0), "aux": {"tensor": auxes[kind]}}
    says = "aux: expected the aux of 5 rows, it has 4"
    refused_header(
        wire, BACKWARD, header, raw(dy), code="invalid_operands", operand="aux", says=says
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, f"aux: expected a {KINDS}, got kind none"),
        ({"kind": "tensor"}, f"aux: expected a {KINDS}, got kind tensor"),
        ({"kind": "gelu_aux"}, "aux: expected dtype float64 or ... got 'uint8'"),
        ({"kind": "silu_aux"}, "aux: expected dtype float64 or ... got 'uint8'"),
        ({"kind": "relu_aux", "dtype": "float32"}, "aux: expected dtype uint8, got 'float32'"),
        ({"kind": "relu_aux", "shape": [2, 16]}, "aux: expected shape (16, 2) (relu_aux of 4 rows"),
        ({"kind": "relu_aux", "shape": [32]}, "aux: expected shape (16, 2) ... got (32,)"),
    ],
)
def test_an_aux_in_the_body_of_another_kind_or_shape(
    wire: Wire, given: dict[str, Any], says: str
) -> None:
    mask = raw(pack_mask(np.ones((4, 2), np.bool_)))
    aux = {"dtype": "uint8", "shape": [16, 2], "payload": 1, **given}
    header = {"dy": tensor(DY, 0), "aux": aux}
    refused_header(
        wire,
        BACKWARD,
        header,
        raw(DY),
        mask,
        code="invalid_operands",
        operand="aux",
        says=says,
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [("relu_aux", "gelu_aux"), ("gelu_erf_aux", "gelu_aux"), ("silu_aux", "leaky_relu_aux")],
)
def test_an_aux_that_is_said_to_be_of_another_kind(
    wire: Wire, auxes: dict[str, str], kind: str, said: str
) -> None:
    header = {"dy": tensor(DY, 0), "aux": {"tensor": auxes[kind], "kind": said}}
    says = f"aux: expected kind {kind}, which the tensor has, got {said}"
    refused_header(
        wire, BACKWARD, header, raw(DY), code="invalid_operands", operand="aux", says=says
    )


@pytest.mark.parametrize(
    ("epilog", "field", "kind", "code", "says"),
    [
        (
            "DRELU",
            "relu_aux",
            "gelu_aux",
            "invalid_operands",
            "dtype uint8, the tensor has float32",
        ),
        ("DGELU", "gelu_aux", "relu_aux", "invalid_operands", "the tensor has uint8"),
        (
            "DGELU",
            "gelu_aux",
            "gelu_erf_aux",
            "invalid_operands",
            "gelu_aux: expected kind gelu_aux, got gelu_erf_aux",
        ),
        ("DGELU", "gelu_aux", "silu_aux", "invalid_operands", "expected kind gelu_aux, got silu"),
        ("DRELU", "gelu_aux", "gelu_aux", "malformed", "expected relu_aux with epilog DRELU"),
        ("RELU", "relu_aux", "relu_aux", "malformed", "expected no relu_aux with epilog RELU"),
    ],
)
def test_an_aux_of_another_epilog(
    wire: Wire, auxes: dict[str, str], epilog: str, field: str, kind: str, code: str, says: str
) -> None:
    b = np.ones((4, 2), np.float32)
    header = {
        "a": tensor(np.ones((4, 4), np.float32), 0),
        "b": tensor(b, 1),
        "epilog": epilog,
        field: {"tensor": auxes[kind]},
    }
    operand = "relu_aux" if epilog == "DRELU" else field
    refused_header(wire, MATMUL, header, bytes(64), raw(b), code=code, operand=operand, says=says)


def test_an_aux_of_another_layer(wire: Wire) -> None:
    weights = [wire.hold(WEIGHT) for _ in range(2)]
    header = {"x": tensor(X, 0), "weight": {"tensor": weights[0]}, "activation": "relu"}
    answer = wire.send(FORWARD, {**header, "save_aux": True}, BODY[0])
    aux = answer.header["aux"]["tensor"]
    given = {"dy": tensor(DY, 0), "aux": {"tensor": aux}, "weight": {"tensor": weights[1]}}
    says = f"aux: expected the aux of the layer of weight {weights[1]}, it is that of {weights[0]}"
    refused_header(wire, BACKWARD, given, raw(DY), code="conflict", operand="aux", says=says)
    given["weight"] = {"tensor": weights[0]}
    assert wire.send(BACKWARD, given, raw(DY)).status == 200
    for handle in (*weights, aux):
        wire.request("DELETE", f"{TENSORS}/{handle}")
