"""Operands that are wrong by themselves or do not fit each other: 422 invalid_operands."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ..local import Wire, raw, tensor
from ..reference import Host
from .refusals import (
    BACKWARD,
    BODY,
    FORWARD,
    MATMUL,
    MLP_FORWARD,
    TENSORS,
    WARM,
    WEIGHT,
    X,
    forward,
    refused_header,
)

SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)


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


@pytest.mark.parametrize("nbytes", [0, 1, 20, 23, 25, 28, 1 << 16])
def test_a_size_that_its_payload_does_not_have(wire: Wire, nbytes: int) -> None:
    says = f"x: expected 24 bytes for shape [2, 3] of float32, got {nbytes}"
    refused_header(
        wire,
        FORWARD,
        forward(),
        bytes(nbytes),
        BODY[1],
        code="invalid_operands",
        operand="x",
        says=says,
    )


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([-1, 3], "x: expected extents ≥ 0, got [-1, 3]"),
        ([2, -(1 << 63)], "x: expected extents ≥ 0"),
        ([1 << 62, 3], "x: expected at most 2^48 bytes, shape [4611686018427387904, 3] of float32"),
        ([1 << 32, 1 << 32], "x: expected at most 2^48 bytes"),
        ([(1 << 63) - 1, (1 << 63) - 1], "x: expected at most 2^48 bytes"),
        ([0, 1 << 62], "x: expected at most 2^48 bytes"),
        ([1 << 31, 1 << 31, 4], "x: expected at most 2^48 bytes"),  # 2^64 elements: 0 in an int64
        ([1 << 44, 3], "x: expected 211106232532992 bytes for shape ... got 24"),
        ([2], "x: expected shape […, batch, 3] (weight is (4, 3)), got (2,)"),
        ([], "x: expected shape […, batch, 3] (weight is (4, 3)), got ()"),
        ([2, 4], "x: expected shape […, batch, 3] (weight is (4, 3)), got (2, 4)"),
        ([3, 0], "x: expected shape […, batch, 3] (weight is (4, 3)), got (3, 0)"),
    ],
)
def test_shapes_of_x(wire: Wire, shape: list[int], says: str) -> None:
    count = int(np.prod(shape)) if all(0 <= extent < 100 for extent in shape) else 6
    x = {"dtype": "float32", "shape": shape, "payload": 0}
    invalid(wire, FORWARD, forward(x=x), zeros(count), WEIGHT, operand="x", says=says)


def test_more_dimensions_than_eight(wire: Wire) -> None:
    x = described(*[1] * 8, 3)
    says = "x.shape: expected at most 8 items ... not 9, got [1, 1,"
    refused_header(wire, FORWARD, forward(x=x), *BODY, code="malformed", operand="x", says=says)
    answer = wire.send(FORWARD, forward(x=described(*[1] * 6, 2, 3)), *BODY)
    assert answer.header["y"]["shape"] == [*[1] * 6, 2, 4]


@pytest.mark.parametrize("shape", [(3,), (1, 4, 3), (0, 3), (4, 0), (0, 0), (12,), ()])
def test_shapes_of_a_weight(wire: Wire, shape: tuple[int, ...]) -> None:
    header = forward(x=described(2, shape[-1] if shape else 1), weight=described(*shape, payload=1))
    says = f"weight: expected shape [out, in] with out, in ≥ 1, got {shape}"
    x = zeros(2, shape[-1] if shape else 1)
    invalid(wire, FORWARD, header, x, zeros(*shape), operand="weight", says=says)


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
    says = f"expected dtype float64 or float32 or float16 or bfloat16, got {dtype[:40]!r}"
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
    ("strides", "says"),
    [
        ([3], "x: expected 2 strides for shape [2, 3], got [3]"),
        ([3, 1, 1], "x: expected 2 strides for shape [2, 3], got [3, 1, 1]"),
        ([-3, 1], "x: expected strides ≥ 0, got [-3, 1]"),
        ([0, 1], "x: expected elements that do not overlap, got strides [0, 1] for shape [2, 3]"),
        ([1, 1], "x: expected elements that do not overlap, got strides [1, 1] for shape [2, 3]"),
        ([2, 1], "x: expected elements that do not overlap"),
        ([1, 0], "x: expected elements that do not overlap"),
        ([4, 1], "x: expected 28 bytes or more ... strides [4, 1], got 24"),
        ([1, 3], "x: expected 32 bytes or more ... strides [1, 3], got 24"),
        ([1 << 62, 1], "bytes or more ... strides [4611686018427387904, 1], got 24"),
    ],
)
def test_strides_of_a_payload(wire: Wire, strides: list[int], says: str) -> None:
    header = forward(x=tensor(X, 0, strides=strides))
    invalid(wire, FORWARD, header, X, WEIGHT, operand="x", says=says)


def test_strides_of_a_payload_in_broken_elements(wire: Wire) -> None:
    says = "x: expected 24 bytes or more, in whole elements, ... got 25"
    header = forward(x=tensor(X, 0, strides=[1, 2]))
    refused_header(
        wire,
        FORWARD,
        header,
        bytes(25),
        BODY[1],
        code="invalid_operands",
        operand="x",
        says=says,
    )


def test_strides_of_size_1_do_not_matter(wire: Wire) -> None:
    row = X[:1]
    header = forward(x=tensor(row, 0, strides=[0, 1]))
    answer = wire.send(FORWARD, header, raw(row), BODY[1])
    assert np.array_equal(answer.array("y"), row @ WEIGHT.T)


def test_an_offset_into_a_payload(wire: Wire) -> None:
    says = "x: expected an offset with a handle only, got 1"
    invalid(wire, FORWARD, forward(x=tensor(X, 0, offset=1)), X, WEIGHT, operand="x", says=says)


@pytest.mark.parametrize(
    ("view", "says"),
    [
        ({"shape": [2, 3], "offset": 1}, "6 elements, got elements 1 to 6 by shape [2, 3]"),
        ({"shape": [1, 3], "offset": 4}, "6 elements, got elements 4 to 6"),
        ({"offset": -1}, "6 elements, got elements -1 to 4"),
        ({"shape": [1, 3], "offset": 1 << 63}, "6 elements, got elements 9223372036854775808 to"),
        ({"strides": [4, 1]}, "6 elements, got elements 0 to 6 ... strides [4, 1]"),
        ({"strides": [1 << 63, 1]}, "6 elements, got elements 0 to 9223372036854775810"),
        ({"shape": [3, 3], "strides": [3, 1]}, "6 elements, got elements 0 to 8"),
        ({"strides": [1, 1]}, "x: expected elements that do not overlap"),
        ({"shape": [2, 3], "strides": [0, 1]}, "x: expected elements that do not overlap"),
        ({"strides": [3, -1], "offset": 2}, "x: expected strides ≥ 0"),
        ({"strides": [3, 1, 1]}, "x: expected 2 strides for shape [2, 3]"),
        ({"shape": [-2, 3], "offset": 1}, "x: expected extents ≥ 0, got [-2, 3]"),
        ({"shape": [1 << 60, 3], "offset": 1}, "x: expected at most 2^48 bytes"),
        ({"shape": [3, 2]}, "x: expected shape [2, 3], which the tensor has, got [3, 2]"),
        ({"dtype": "float64"}, "x: expected dtype float32, which the tensor has, got float64"),
        ({"kind": "gelu_aux"}, "x: expected kind tensor, which the tensor has, got gelu_aux"),
    ],
)
def test_views_of_a_tensor(wire: Wire, view: dict[str, Any], says: str) -> None:
    handle = wire.hold(X)
    header = {"x": {"tensor": handle, **view}, "weight": tensor(WEIGHT, 0)}
    invalid(wire, FORWARD, header, WEIGHT, operand="x", says=says)
    wire.request("DELETE", f"{TENSORS}/{handle}")


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
            "layers[0].activation: expected none, relu or gelu, got 'tanh'",
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


@pytest.mark.parametrize("activation", ["gelu_erf", "gelu(erf)"])
def test_the_erf_form_of_gelu(wire: Wire, activation: str) -> None:
    says = f"expected none, relu or gelu, got '{activation}' (gelu is the tanh form; the erf form"
    header = forward(activation=activation)
    invalid(wire, FORWARD, header, X, WEIGHT, operand="activation", says=says)


def test_results_that_overflow(wire: Wire) -> None:
    """Products of no elements whose extents are more than an address reaches."""
    header = {"x": described(1 << 45, 0, 1), "weight": described(64, 1, payload=1)}
    says = "y: expected at most 2^48 bytes, shape [35184372088832, 0, 64] of float32 has more"
    invalid(wire, FORWARD, header, zeros(0), zeros(64), operand="y", says=says)
    header = {"a": described(0, 1 << 40, 1), "b": described(0, 1, 1 << 40, payload=1)}
    says = "d: expected at most 2^48 bytes, shape [0, 1099511627776, 1099511627776]"
    invalid(wire, MATMUL, header, zeros(0), zeros(0), operand="d", says=says)
    header = {"dz": described(0, 1 << 40), "x": described(0, 1 << 40, payload=1)}
    says = "dweight: expected at most 2^48 bytes, shape [1099511627776, 1099511627776]"
    invalid(wire, BACKWARD, header, zeros(0), zeros(0), operand="dweight", says=says)


def test_descriptions_that_overflow(wire: Wire) -> None:
    wide = {"dtype": "float32", "shape": [1 << 40, 1]}
    request = {"operation": "linear/forward", "header": {"x": wide, "weight": wide}}
    says = "y: expected at most 2^48 bytes"
    invalid(wire, WARM, {"requests": [request]}, operand="y", says=says)
