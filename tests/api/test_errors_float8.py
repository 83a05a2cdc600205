"""What 8-bit floats cannot do: 422 invalid_operands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ..local import Wire, raw, tensor
from ..reference import DTYPES, FLOAT8, Host
from .refusals import (
    BACKWARD,
    FORWARD,
    MATMUL,
    MLP_FORWARD,
    OCTETS,
    TENSORS,
    WARM,
    invalid,
    refused,
    refused_header,
)

E4M3, E5M2 = FLOAT8["float8_e4m3fn"], FLOAT8["float8_e5m2"]
SCALES: dict[str, Any] = {"x": 0.5, "weight": 2.0}
BLACKWELL = ["float8_e8m0fnu", "float4_e2m1fn", "mxfp8", "MXFP8", "mxfp4", "nvfp4", "NVFP4"]


def zeros(*shape: int, dtype: Any = E4M3) -> Host:
    return np.zeros(shape, dtype)


X, WEIGHT = zeros(3, 32), zeros(16, 32)


def linear(x: Host = X, weight: Host = WEIGHT, **changes: Any) -> tuple[Any, ...]:
    """The header of a layer, valid with the defaults, and its payloads."""
    header = {"x": tensor(x, 0), "weight": tensor(weight, 1), "scales": SCALES, **changes}
    return header, x, weight


def product(a: Host, b: Host, **changes: Any) -> tuple[Any, ...]:
    header = {"a": tensor(a, 0), "b": tensor(b, 1), "scales": {"a": 1, "b": 1}, **changes}
    return header, a, b


def test_the_defaults_are_valid(wire: Wire) -> None:
    header, *arrays = linear()
    assert wire.send(FORWARD, header, *map(raw, arrays)).status == 200
    header, *arrays = product(WEIGHT, zeros(32, 16))
    assert wire.send(MATMUL, header, *map(raw, arrays)).status == 200


@pytest.mark.parametrize("dtype", BLACKWELL)
def test_types_of_blackwell(wire: Wire, dtype: str) -> None:
    needs = f"got {dtype!r}, which needs a GPU of compute capability 10 (Blackwell)"
    header, *arrays = linear()
    header["x"]["dtype"] = dtype
    invalid(wire, FORWARD, header, *arrays, operand="x", says=f"x: expected dtype ... {needs}")
    header = {"dtype": dtype, "shape": [16]}
    invalid(wire, TENSORS, header, operand="tensor", says=f"tensor: expected dtype ... {needs}")
    header = {"value": tensor(zeros(4, dtype=np.float32), 0), "quantize": dtype}
    says = f"quantize: expected dtype float8_e4m3fn or float8_e5m2, {needs}"
    invalid(wire, TENSORS, header, zeros(4, dtype=np.float32), operand="quantize", says=says)


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 33), (17, 32), (1, 16), (16, 8), (24, 24)])
def test_weights_whose_sizes_are_no_multiples_of_16(wire: Wire, outputs: int, inputs: int) -> None:
    x, weight = zeros(2, inputs), zeros(outputs, inputs)
    says = (
        "weight: expected out and in in multiples of 16 for float8_e4m3fn, "
        f"got ({outputs}, {inputs})"
    )
    invalid(wire, FORWARD, *linear(x, weight), operand="weight", says=says)
    layers = [{"weight": tensor(weight, 1), "scales": {"weight": 1}}]
    header = {"x": tensor(x, 0), "layers": layers, "scales": {"x": 1}}
    invalid(wire, MLP_FORWARD, header, x, weight, operand="layers[0].weight", says=says[8:])


@pytest.mark.parametrize(
    ("m", "n", "k", "operand"), [(17, 16, 16, "a"), (16, 16, 8, "a"), (16, 15, 16, "b")]
)
def test_products_whose_sizes_are_no_multiples_of_16(
    wire: Wire, m: int, n: int, k: int, operand: str
) -> None:
    names, shape = ("M and K", (m, k)) if operand == "a" else ("K and N", (k, n))
    says = f"{operand}: expected {names} in multiples of 16 for float8_e4m3fn, got {shape}"
    invalid(wire, MATMUL, *product(zeros(m, k), zeros(k, n)), operand=operand, says=says)


def test_e5m2_by_e5m2(wire: Wire) -> None:
    says = "expected float8_e4m3fn with {} of float8_e5m2, got float8_e5m2, which no GPU multiplies"
    x, weight = zeros(3, 32, dtype=E5M2), zeros(16, 32, dtype=E5M2)
    invalid(wire, FORWARD, *linear(x, weight), operand="weight", says=says.format("x"))
    a, b = zeros(16, 16, dtype=E5M2), zeros(16, 16, dtype=E5M2)
    invalid(wire, MATMUL, *product(a, b), operand="b", says=says.format("a"))


@pytest.mark.parametrize("other", DTYPES)
def test_8_bit_by_wider(wire: Wire, other: str) -> None:
    wide = zeros(16, 32, dtype=DTYPES[other])
    says = f"weight: expected dtype float8_e4m3fn (that of x), got {other}"
    header, *arrays = linear(X, wide)
    invalid(wire, FORWARD, header, *arrays, operand="weight", says=says)
    says = f"weight: expected dtype {other} (that of x), got float8_e4m3fn"
    x = zeros(3, 32, dtype=DTYPES[other])
    invalid(wire, FORWARD, *linear(x), operand="weight", says=says)


@pytest.mark.parametrize("result", ["float64", "float8_e4m3fn", "float8_e5m2", "uint8"])
def test_result_types(wire: Wire, result: str) -> None:
    says = f"expected bfloat16 or float16 or float32 for float8_e4m3fn operands ... got {result!r}"
    operand, options = "options.result_type", {"result_type": result}
    invalid(wire, FORWARD, *linear(options=options), operand=operand, says=says)
    two = zeros(16, 16)
    invalid(wire, MATMUL, *product(two, two, options=options), operand=operand, says=says)


@pytest.mark.parametrize("compute", ["COMPUTE_16F", "COMPUTE_32F_FAST_TF32", "COMPUTE_64F"])
def test_compute_types(wire: Wire, compute: str) -> None:
    says = f"expected COMPUTE_32F for float8_e4m3fn operands, got {compute!r}"
    options = {"compute_type": compute}
    invalid(wire, FORWARD, *linear(options=options), operand="options.compute_type", says=says)


@pytest.mark.parametrize(
    ("result", "bias", "expected"),
    [
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "float32", "bfloat16"),
        ("float16", "bfloat16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
    ],
)
def test_biases_of_another_dtype(wire: Wire, result: str, bias: str, expected: str) -> None:
    array = zeros(16, dtype=DTYPES[bias])
    says = f"bias: expected dtype {expected} (with float8_e4m3fn and a {result} result), got {bias}"
    header, *arrays = linear(bias=tensor(array, 2), options={"result_type": result})
    invalid(wire, FORWARD, header, *arrays, array, operand="bias", says=says)
    changes = {"bias": tensor(array, 2), "epilog": "BIAS", "options": {"result_type": result}}
    header, *arrays = product(zeros(16, 16), zeros(16, 16), **changes)
    invalid(wire, MATMUL, header, *arrays, array, operand="bias", says=says)


def test_c_and_targets_of_another_dtype(wire: Wire) -> None:
    c = zeros(3, 16, dtype=np.float32)
    header, *arrays = linear(c=tensor(c, 2), beta=1.0)
    says = "c: expected dtype bfloat16 (that of y), got float32"
    invalid(wire, FORWARD, header, *arrays, c, operand="c", says=says)
    handle = wire.hold(zeros(3, 16))
    header, *arrays = linear(outputs={"y": {"tensor": handle}})
    says = f"outputs.y: expected a tensor [3, 16] of bfloat16, {handle} is [3, 16] of float8_e4m3fn"
    invalid(wire, FORWARD, header, *arrays, operand="outputs.y", says=says)
    wire.request("DELETE", f"{TENSORS}/{handle}")


@pytest.mark.parametrize("name", ["x", "weight"])
def test_no_scale(wire: Wire, name: str) -> None:
    others = {other: 1.0 for other in SCALES if other != name}
    says = f"scales.{name}: expected a scale for {name} of float8_e4m3fn, got none"
    invalid(wire, FORWARD, *linear(scales=others), operand=f"scales.{name}", says=says)


def test_no_scale_in_other_operations(wire: Wire) -> None:
    two = zeros(16, 16)
    says = "scales.b: expected a scale for b of float8_e4m3fn, got none"
    invalid(wire, MATMUL, *product(two, two, scales={"a": 1}), operand="scales.b", says=says)
    header = {"x": tensor(X, 0), "layers": [{"weight": tensor(WEIGHT, 1)}], "scales": {"x": 1}}
    operand = "layers[0].scales.weight"
    says = f"{operand}: expected a scale for layers[0].weight of float8_e4m3fn, got none"
    invalid(wire, MLP_FORWARD, header, X, WEIGHT, operand=operand, says=says)


def test_a_held_tensor_that_was_not_quantized_has_no_scale(wire: Wire) -> None:
    handle = wire.hold(WEIGHT)
    header = {"x": tensor(X, 0), "weight": {"tensor": handle}, "scales": {"x": 1}}
    says = "scales.weight: expected a scale for weight of float8_e4m3fn, got none"
    invalid(wire, FORWARD, header, X, operand="scales.weight", says=says)
    wire.request("DELETE", f"{TENSORS}/{handle}")


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.inf, -math.inf, math.nan, 1e300, 1e-300])
def test_numbers_that_are_no_scales(wire: Wire, value: float) -> None:
    says = f"scales.x: expected a finite float32 > 0, got {float(value)}"
    scales = {"x": value, "weight": 1}
    invalid(wire, FORWARD, *linear(scales=scales), operand="scales.x", says=says)


@pytest.mark.parametrize("shape", [(2,), (1, 1), (0,), (3, 4)])
def test_scale_tensors_of_another_shape(wire: Wire, shape: tuple[int, ...]) -> None:
    handle = wire.hold(zeros(*shape, dtype=np.float32))
    scales = {"x": 1, "weight": {"tensor": handle}}
    says = f"scales.weight: expected shape () or (1,), got {shape}"
    invalid(wire, FORWARD, *linear(scales=scales), operand="scales.weight", says=says)
    wire.request("DELETE", f"{TENSORS}/{handle}")


def test_scale_tensors_of_another_dtype(wire: Wire) -> None:
    handle = wire.hold(zeros(1, dtype=np.float64))
    scales = {"x": {"tensor": handle}, "weight": 1}
    says = "scales.x: expected dtype float32, the tensor has float64"
    invalid(wire, FORWARD, *linear(scales=scales), operand="scales.x", says=says)
    wire.request("DELETE", f"{TENSORS}/{handle}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_wider_types(wire: Wire, dtype: str) -> None:
    x, weight = zeros(3, 32, dtype=DTYPES[dtype]), zeros(16, 32, dtype=DTYPES[dtype])
    says = f"scales.x: expected no scale, x is {dtype}"
    invalid(wire, FORWARD, *linear(x, weight), operand="scales.x", says=says)


@pytest.mark.parametrize("scales", [{"y": 1}, {"x": "1"}, {"x": True}, {"x": None}, {"x": [1]}, 1])
def test_scales_that_are_none(wire: Wire, scales: Any) -> None:
    header, *arrays = linear(scales=scales)
    answer = wire.send(FORWARD, header, *map(raw, arrays))
    assert (answer.status, answer.header["code"]) == (400, "malformed")
    assert "scales" in answer.header["detail"]


@pytest.mark.parametrize(
    "epilog", ["DRELU", "DRELU_BGRAD", "DGELU", "DGELU_BGRAD", "BGRADA", "BGRADB"]
)
def test_epilogs_of_a_backward_pass(wire: Wire, epilog: str) -> None:
    two = zeros(16, 16)
    says = f"epilog: expected none of a backward pass with float8_e4m3fn, got {epilog}"
    invalid(wire, MATMUL, *product(two, two, epilog=epilog), operand="epilog", says=says)


def test_no_backward_pass(wire: Wire) -> None:
    says = "dz: expected dtype float64 or float32 or float16 or bfloat16, got 'float8_e4m3fn'"
    header: dict[str, Any] = {"dz": tensor(X, 0), "wants": ["dbias"]}
    invalid(wire, BACKWARD, header, X, operand="dz", says=says)
    layers = [{"weight": tensor(WEIGHT, 1), "scales": {"weight": 1}}]
    header = {"x": tensor(X, 0), "layers": layers, "scales": {"x": 1}, "save_tape": True}
    says = "save_tape: expected false with float8_e4m3fn, which has no backward pass"
    invalid(wire, MLP_FORWARD, header, X, WEIGHT, operand="save_tape", says=says)


def test_8_bit_weights_deeper_in_a_stack(wire: Wire) -> None:
    second = zeros(16, 16)
    layers = [
        {"weight": tensor(WEIGHT, 1), "scales": {"weight": 1}},
        {"weight": tensor(second, 2), "scales": {"weight": 1}},
    ]
    header = {"x": tensor(X, 0), "layers": layers, "scales": {"x": 1}}
    operand = "layers[1].weight"
    says = (
        f"{operand}: expected dtype bfloat16 (that of the output of layers[0]), got float8_e4m3fn"
    )
    invalid(wire, MLP_FORWARD, header, X, WEIGHT, second, operand=operand, says=says)


def test_plans_made_ahead_are_checked_too(wire: Wire) -> None:
    header = {
        "x": {"dtype": "float8_e4m3fn", "shape": [2, 24]},
        "weight": {"dtype": "float8_e4m3fn", "shape": [16, 24]},
    }
    requests = [{"operation": "linear/forward", "header": header}]
    says = "weight: expected out and in in multiples of 16"
    answer = wire.send(WARM, {"requests": requests})
    assert (answer.status, answer.header["code"]) == (422, "invalid_operands")
    assert says in answer.header["detail"]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_quantizing_what_is_not_finite(wire: Wire, poison: float) -> None:
    array = np.ones((4, 4), np.float32)
    array[1, 2] = poison
    says = "value: expected finite float32 numbers to quantize, got"
    header = {"value": tensor(array, 0), "quantize": "float8_e4m3fn"}
    invalid(wire, TENSORS, header, array, operand="value", says=says)
    query = f"{TENSORS}?dtype=float32&shape=4,4&quantize=float8_e4m3fn"

    def sent() -> Any:
        return wire.request("POST", query, raw(array), {"Content-Type": OCTETS})

    refused(wire, sent, code="invalid_operands", operand="value", says=says)


def test_quantizing_what_float32_cannot_hold(wire: Wire) -> None:
    array = np.array([1e300, 1.0])
    header = {"value": tensor(array, 0), "quantize": "float8_e5m2"}
    says = "value: expected finite float32 numbers to quantize, got inf among them"
    invalid(wire, TENSORS, header, array, operand="value", says=says)


@pytest.mark.parametrize("dtype", ["float16", "uint8", "float8", ""])
def test_quantizing_to_other_types(wire: Wire, dtype: str) -> None:
    array = np.ones(4, np.float32)
    says = f"quantize: expected dtype float8_e4m3fn or float8_e5m2, got {dtype!r}"
    header = {"value": tensor(array, 0), "quantize": dtype}
    invalid(wire, TENSORS, header, array, operand="quantize", says=says)


def test_quantizing_what_is_8_bit_or_an_aux(wire: Wire) -> None:
    says = (
        "value: expected a tensor of float64 or float32 or float16 or bfloat16 to quantize, got a"
    )
    header: dict[str, Any] = {"value": tensor(X, 0), "quantize": "float8_e4m3fn"}
    invalid(wire, TENSORS, header, X, operand="value", says=f"{says} tensor of float8_e4m3fn")
    aux = np.ones((8, 2), np.float32)
    header["value"] = tensor(aux, 0, kind="gelu_aux")
    invalid(wire, TENSORS, header, aux, operand="value", says=f"{says} gelu_aux of float32")


def test_quantizing_zeros(wire: Wire) -> None:
    header = {"dtype": "float32", "shape": [4], "quantize": "float8_e4m3fn"}
    says = "quantize: expected with a value only"
    refused_header(wire, TENSORS, header, code="malformed", operand="quantize", says=says)


def test_an_8_bit_aux(wire: Wire) -> None:
    aux = zeros(8, 2)
    says = "value: expected dtype float64 or ... or bfloat16 for gelu_aux, got float8_e4m3fn"
    header = {"value": tensor(aux, 0, kind="gelu_aux")}
    invalid(wire, TENSORS, header, aux, operand="value", says=says)


def test_replacing_what_is_quantized(wire: Wire) -> None:
    """By what has the dtype that it was made from, and is finite; else it stays as it is."""
    array = np.ones((4, 4), np.float32)
    handle = wire.hold(array, quantize="float8_e4m3fn")
    path = f"{TENSORS}/{handle}"
    before = wire.get(f"{path}/metadata")
    for wrong in (zeros(4, 4), zeros(4, 4, dtype=np.float64), zeros(4, 3, dtype=np.float32)):
        header = {"value": tensor(wrong, 0)}
        says = "value: expected tensor [4, 4] of float32, got tensor"
        refused_header(
            wire,
            path,
            header,
            raw(wrong),
            code="invalid_operands",
            operand="value",
            says=says,
            method="PUT",
        )
    array[0, 0] = math.nan
    refused_header(
        wire,
        path,
        {"value": tensor(array, 0)},
        raw(array),
        code="invalid_operands",
        operand="value",
        says="value: expected finite float32 numbers",
        method="PUT",
    )
    answer = wire.request("PUT", path, bytes(16), {"Content-Type": OCTETS})
    assert (answer.status, answer.header["code"]) == (400, "malformed")
    after = wire.get(f"{path}/metadata")
    unlike = {"expires_in_s"}
    assert {k: v for k, v in after.items() if k not in unlike} == {
        k: v for k, v in before.items() if k not in unlike
    }
    wire.request("DELETE", path)
