"""What a request needs and does not take: scales, gradients, what goes with an epilog."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..local import Wire, raw, tensor
from .refusals import BACKWARD, BODY, FORWARD, MATMUL, forward, refused_header

DZ = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32)
PRODUCT = {"a": tensor(DZ, 0), "b": tensor(DZ, 0)}
C = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("header", "operand", "says"),
    [
        (forward(beta=1.0), "beta", "expected with c, and only with c; beta came without c"),
        (forward(beta=0.0), "beta", "beta came without c"),
        (forward(c=tensor(C, 2)), "beta", "c came without beta"),
        (forward(c=tensor(C.T, 2), beta=1.0), "c", "expected shape (2, 4) ... got (4, 2)"),
        (forward(c=tensor(C[0], 2), beta=1.0), "c", "expected shape (2, 4) ... got (4,)"),
        (
            forward(save_aux=True),
            "save_aux",
            "expected activation relu, gelu, gelu_erf, silu or leaky_relu, got none",
        ),
    ],
)
def test_scales_and_aux(wire: Wire, header: dict[str, Any], operand: str, says: str) -> None:
    payloads = [*BODY, bytes(4 * int(np.prod(header["c"]["shape"])))] if "c" in header else BODY
    refused_header(
        wire,
        FORWARD,
        header,
        *payloads,
        code="invalid_operands",
        operand=operand,
        says=f"{operand}: ... {says}",
    )


@pytest.mark.parametrize("scale", [{"beta": 1.0}, {"c": tensor(DZ, 0)}])
def test_scales_of_a_product(wire: Wire, scale: dict[str, Any]) -> None:
    says = "beta: expected with c, and only with c"
    header = PRODUCT | scale
    refused_header(
        wire, MATMUL, header, raw(DZ), code="invalid_operands", operand="beta", says=says
    )


DY, AUX = {"dy": tensor(DZ, 0)}, {"aux": {"tensor": "h"}}


@pytest.mark.parametrize(
    ("header", "operand", "says"),
    [
        ({}, "dz", "expected dz alone, or dy with aux, got none"),
        (DY, "dz", "expected dz alone, or dy with aux, got ['dy']"),
        (AUX, "dz", "expected dz alone, or dy with aux, got ['aux']"),
        (DY | AUX | {"dz": tensor(DZ, 0)}, "dz", "got ['dz', 'dy', 'aux']"),
        ({"dz": tensor(DZ, 0), "wants": []}, "wants", "expected at least one of dx, dweight"),
        (
            {"dz": tensor(DZ, 0), "wants": ["dbias"], "input_aux": tensor(DZ, 0, kind="gelu_aux")},
            "input_aux",
            "expected with dx only",
        ),
    ],
)
def test_gradients_that_cannot_be(
    wire: Wire, header: dict[str, Any], operand: str, says: str
) -> None:
    payloads = [raw(DZ)] if "payload" in str(header) else []
    refused_header(
        wire,
        BACKWARD,
        header,
        *payloads,
        code="malformed",
        operand=operand,
        says=f"{operand}: ... {says}",
    )


@pytest.mark.parametrize(
    ("epilog", "more", "operand", "says"),
    [
        ("BIAS", {}, "bias", "bias: expected a bias with epilog BIAS"),
        ("RELU", {"bias": tensor(DZ[0], 0)}, "bias", "bias: expected no bias with epilog RELU"),
        (None, {"bias": tensor(DZ[0], 0)}, "bias", "bias: expected no bias with epilog NONE"),
        ("DRELU", {}, "relu_aux", "relu_aux: expected relu_aux with epilog DRELU"),
        ("DGELU_BGRAD", {}, "gelu_aux", "gelu_aux: expected gelu_aux with epilog DGELU_BGRAD"),
    ],
)
def test_what_an_epilog_needs(
    wire: Wire, epilog: str | None, more: dict[str, Any], operand: str, says: str
) -> None:
    header = PRODUCT | {"epilog": epilog} | more
    refused_header(wire, MATMUL, header, raw(DZ), code="malformed", operand=operand, says=says)
