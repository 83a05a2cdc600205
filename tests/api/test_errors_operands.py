"""Operands that do not fit each other, and dtypes: 422 invalid_operands."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ..local import Wire, raw, tensor
from ..reference import Host
from .refusals import (
    BACKWARD,
    FORWARD,
    MATMUL,
    MLP_FORWARD,
    TENSORS,
    WEIGHT,
    X,
    described,
    forward,
    invalid,
    zeros,
)

SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_bias_of_another_length(wire: Wire, batch: int, length: int) -> None:
    header = forward(x=described(batch, 3), bias=described(length, payload=2))
    says = f"bias: expected shape (4,) ([out], weight is (4, 3)), got ({length},)"
    invalid(
        wire, FORWARD, header, zeros(batch, 3), WEIGHT, zeros(length), operand="bias", says=says
    )


@pytest.mark.parametrize("shape", [(2,), (1, 3), (3, 1), (3, 3), ()])
def test_a_bias_of_another_shape_when_batch_equals_out(wire: Wire, shape: tuple[int, ...]) -> None:
    """Where a bias that is applied along the wrong axis would go unnoticed."""
    header = {
        "x": described(3, 3),
        "weight": described(3, 3, payload=1),
        "bias": described(*shape, payload=2),
    }
    says = f"bias: expected shape (3,) ... got {shape}"
    invalid(wire, FORWARD, header, SQUARE, SQUARE, zeros(*shape), operand="bias", says=says)


def test_a_bias_is_by_output_when_batch_equals_out(wire: Wire) -> None:
    bias = np.array([100, 200, 300], np.float32)
    header = {"x": tensor(SQUARE, 0), "weight": tensor(SQUARE, 0), "bias": tensor(bias, 1)}
    answer = wire.send(FORWARD, header, raw(SQUARE), raw(bias))
    assert np.array_equal(answer.array("y"), SQUARE @ SQUARE.T + bias[None, :])


@pytest.mark.parametrize(
    "dtype", ["float8", "int32", "FLOAT32", "f4", "<f4", "object", "uint8", "bool", "\n", "x" * 99]
)
def test_dtypes_that_are_none(wire: Wire, dtype: str) -> None:
    says = f"expected dtype float64 or float32 or ... or float8_e5m2, got {dtype[:40]!r}"
    x = {**tensor(X, 0), "dtype": dtype}
    invalid(wire, FORWARD, forward(x=x), X, WEIGHT, operand="x", says=f"x: {says}")
    header = {"dtype": dtype, "shape": [1]}
    invalid(wire, TENSORS, header, operand="tensor", says=f"tensor: {says}")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_dtypes_that_differ(wire: Wire, dtype: Any) -> None:
    name, other = np.dtype(dtype).name, zeros(4, 3, dtype=dtype)
    says = f"weight: expected dtype float32 (that of x), got {name}"
    invalid(wire, FORWARD, forward(weight=tensor(other, 1)), X, other, operand="weight", says=says)
    bias = zeros(4, dtype=dtype)
    says = f"bias: expected dtype float32 (that of the result), got {name}"
    header = forward(bias=tensor(bias, 2))
    invalid(wire, FORWARD, header, X, WEIGHT, bias, operand="bias", says=says)
    c = zeros(2, 4, dtype=dtype)
    says = f"c: expected dtype float32 (that of y), got {name}"
    header = forward(c=tensor(c, 2), beta=1.0)
    invalid(wire, FORWARD, header, X, WEIGHT, c, operand="c", says=says)
    says = f"b: expected dtype float32 (that of a), got {name}"
    header = {"a": tensor(SQUARE, 0), "b": tensor(zeros(3, 1, dtype=dtype), 1)}
    invalid(wire, MATMUL, header, SQUARE, zeros(3, 1, dtype=dtype), operand="b", says=says)


@pytest.mark.parametrize(
    ("path", "header", "operand", "says"),
    [
        (
            BACKWARD,
            {"dz": described()},
            "dz",
            "dz: expected shape […, batch, out] with out ≥ 1, got ()",
        ),
        (BACKWARD, {"dz": described(2, 0)}, "dz", "with out ≥ 1, got (2, 0)"),
        (
            BACKWARD,
            {"dz": described(2, 3), "weight": described(2, 3)},
            "weight",
            "weight: expected shape (3, 3) ([out, in], dz is (2, 3)), got (2, 3)",
        ),
        (
            BACKWARD,
            {"dz": described(2, 3), "weight": described(3, 0)},
            "weight",
            "weight: expected shape [out, in] with out, in ≥ 1, got (3, 0)",
        ),
        (
            BACKWARD,
            {"dz": described(2, 3), "x": described(3, 2)},
            "x",
            "x: expected shape (2, 2) ([…, batch, in] with in ≥ 1), got (3, 2)",
        ),
        (BACKWARD, {"dz": described(0, 3), "x": described(0, 0)}, "x", "in ≥ 1), got (0, 0)"),
        (
            BACKWARD,
            {"dz": described(2, 3), "weight": described(3, 5), "x": described(2, 4)},
            "x",
            "x: expected shape (2, 5) ... got (2, 4)",
        ),
        (
            BACKWARD,
            {"dz": described(2, 3), "x": described(2, 4, dtype="float64")},
            "x",
            "x: expected dtype float32 (that of dz), got float64",
        ),
        (
            MLP_FORWARD,
            {
                "x": described(2, 3),
                "layers": [{"weight": described(4, 3)}, {"weight": described(4, 3)}],
            },
            "layers[1].weight",
            "layers[1].weight: expected shape [out, 4] after layers[0], got (4, 3)",
        ),
        (
            MLP_FORWARD,
            {
                "x": described(2, 3),
                "layers": [{"weight": described(4, 3), "bias": described(3)}],
            },
            "layers[0].bias",
            "layers[0].bias: expected shape (4,) ([out], weight is (4, 3)), got (3,)",
        ),
        (
            MLP_FORWARD,
            {"x": described(2, 3), "layers": [{"weight": described(4, 3), "activation": "tanh"}]},
            "layers[0].activation",
            "layers[0].activation: expected none, relu, gelu, gelu_erf, silu or leaky_relu, "
            "got 'tanh'",
        ),
        (MATMUL, {"a": described(3), "b": described(3, 2)}, "a", "shape […, M, K] ... got (3,)"),
        (MATMUL, {"a": described(3, 0), "b": described(0, 2)}, "a", "none of them 0, got (3, 0)"),
        (MATMUL, {"a": described(3, 2), "b": described(2, 0)}, "b", "none of them 0, got (2, 0)"),
        (
            MATMUL,
            {"a": described(3, 2), "b": described(3, 2)},
            "b",
            "b: expected K = 2 (a is (3, 2)), got (3, 2)",
        ),
        (
            MATMUL,
            {"a": described(4, 3, 2), "b": described(5, 2, 1)},
            "b",
            "b: expected batch dimensions (4,) (a is (4, 3, 2)) or none, got (5,)",
        ),
        (
            MATMUL,
            {"a": described(3, 2), "b": described(2, 2), "c": described(3), "beta": 1.0},
            "c",
            "c: expected a shape that broadcasts to (3, 2), got (3,)",
        ),
        (
            MATMUL,
            {"a": described(3, 2), "b": described(2, 2), "epilog": "BIAS", "bias": described(2)},
            "bias",
            "bias: expected shape (3,) or (3, 1), got (2,)",
        ),
        (
            MATMUL,
            {"a": described(3, 2), "b": described(2, 2), "epilog": "SOFTMAX"},
            "epilog",
            "epilog: expected one of ... got 'SOFTMAX'",
        ),
    ],
)
def test_operands_that_do_not_fit(
    wire: Wire, path: str, header: dict[str, Any], operand: str, says: str
) -> None:
    """Every tensor is the payload that it needs."""
    payloads: list[Host] = []
    numbered = _numbered(header, payloads)
    invalid(wire, path, numbered, *payloads, operand=operand, says=says)


def _numbered(header: Any, payloads: list[Host]) -> Any:
    """`header` with a payload of its own for each of its tensors."""
    if isinstance(header, list):
        return [_numbered(part, payloads) for part in header]
    if not isinstance(header, dict):
        return header
    if "payload" not in header:
        return {name: _numbered(part, payloads) for name, part in header.items()}
    payloads.append(np.zeros(header["shape"], header["dtype"]))
    return {**header, "payload": len(payloads) - 1}


@pytest.mark.parametrize(
    ("options", "operand", "says"),
    [
        ({"compute_type": "COMPUTE_64F"}, "options.compute_type", "got 'COMPUTE_64F'"),
        ({"compute_type": "COMPUTE_32I"}, "options.compute_type", "for float32 operands, got"),
        ({"result_type": "float16"}, "options.result_type", "expected float32 ... got 'float16'"),
        ({"result_type": "int8"}, "options.result_type", "expected float32 ... got 'int8'"),
    ],
)
def test_options_that_do_not_go_with_the_dtype(
    wire: Wire, options: dict[str, Any], operand: str, says: str
) -> None:
    invalid(wire, FORWARD, forward(options=options), X, WEIGHT, operand=operand, says=says)


def test_an_activation_that_there_is_not(wire: Wire) -> None:
    says = "activation: expected none, relu, gelu, gelu_erf, silu or leaky_relu, got 'gelu(erf)'"
    header = forward(activation="gelu(erf)")
    invalid(wire, FORWARD, header, X, WEIGHT, operand="activation", says=says)
