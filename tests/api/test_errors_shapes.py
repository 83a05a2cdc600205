"""Shapes, strides and sizes that are wrong by themselves: 422 invalid_operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..local import Wire, raw, tensor
from .refusals import (
    BACKWARD,
    BODY,
    FORWARD,
    MATMUL,
    TENSORS,
    WARM,
    WEIGHT,
    X,
    described,
    forward,
    invalid,
    refused_header,
    zeros,
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
        ([1 << 20, 3], "x: expected 12582912 bytes for shape ... got 24"),
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


def test_results_that_overflow(wire: Wire) -> None:
    """Products of no elements whose extents are more than an address reaches."""
    header = {"x": described(1 << 45, 0, 1), "weight": described(64, 1, payload=1)}
    says = "y: expected at most 2^48 bytes, shape [35184372088832, 0, 64] of float32 has more"
    invalid(wire, FORWARD, header, zeros(0), zeros(64), operand="y", says=says)
    header = {"a": described(0, 1 << 40, 1), "b": described(0, 1, 1 << 40, payload=1)}
    says = "outputs.d: expected at most 2^48 bytes, shape [0, 1099511627776, 1099511627776]"
    invalid(wire, MATMUL, header, zeros(0), zeros(0), operand="outputs.d", says=says)
    header = {"dz": described(0, 1 << 40), "x": described(0, 1 << 40, payload=1)}
    says = "outputs.dweight: expected at most 2^48 bytes, shape [1099511627776, 1099511627776]"
    invalid(wire, BACKWARD, header, zeros(0), zeros(0), operand="outputs.dweight", says=says)


def test_descriptions_that_overflow(wire: Wire) -> None:
    wide = {"dtype": "float32", "shape": [1 << 40, 1]}
    request = {"operation": "linear/forward", "header": {"x": wide, "weight": wide}}
    says = "y: expected at most 2^48 bytes"
    invalid(wire, WARM, {"requests": [request]}, operand="y", says=says)
