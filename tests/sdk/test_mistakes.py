"""What cannot be meant is a TypeError that says what can; nothing is sent for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matmuld_client import Accumulate, Client, InvalidOperands, RemoteTensor

X = np.zeros((3, 3), np.float32)
CLIENT: Any = Client("unix:/nowhere")
TENSOR: Any = RemoteTensor(
    CLIENT._channel, {"tensor": "handle", "dtype": "float32", "shape": [3, 3]}, owned=False
)
PLACED = "expected 'array', 'tensor' or a RemoteTensor for the result, got"
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a view takes y": (lambda: CLIENT.linear(X, X, out=TENSOR.T), f"y: {PLACED} TensorView"),
    "an array takes y": (lambda: CLIENT.mlp(X, [], out=X), f"y: {PLACED} ndarray"),
    "a view takes d": (lambda: CLIENT.matmul(X, X, out=TENSOR[:2]), f"d: {PLACED} TensorView"),
    "a view takes dx": (
        lambda: CLIENT.linear_backward(X, dz=X, out={"dx": TENSOR.T}),
        f"dx: {PLACED} TensorView",
    ),
    "a view takes all gradients": (
        lambda: CLIENT.linear_backward(X, dz=X, out=TENSOR.T),
        "out: expected a place, or placements by name, got TensorView",
    ),
    "a view is added to": (
        lambda: CLIENT.linear_backward(x=X, dz=X, out={"dweight": Accumulate(TENSOR.T)}),
        f"dweight: {PLACED} TensorView",
    ),
    "a layer is a tuple": (
        lambda: CLIENT.mlp(X, [(X, None)]),
        r"layers\[0\]: expected a Layer, got tuple",
    ),
    "an aux of no activation": (
        lambda: CLIENT.linear_backward(dy=X, aux=X),
        "aux: expected a RemoteTensor, as an array of float32 does not say of which activation",
    ),
    "a tensor is stored": (lambda: CLIENT.put(TENSOR), r"RemoteTensor .* call numpy\(\)"),
    "an extent is no integer": (lambda: CLIENT.zeros((2.5,)), "float.* as an integer"),
}


@pytest.mark.parametrize(("mistake", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_a_type_error_and_not_sent(mistake: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        mistake()


@pytest.mark.parametrize("count", [1, 1 << 20])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool"])
def test_a_dtype_that_is_not_held_is_told_those_that_are(dtype: str, count: int) -> None:
    says = f"float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, got {dtype}"
    with pytest.raises(InvalidOperands, match=says):
        CLIENT.put(np.zeros(count, dtype))
    with pytest.raises(InvalidOperands, match=says):
        CLIENT.zeros(count, dtype)
