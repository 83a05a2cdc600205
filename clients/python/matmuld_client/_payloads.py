"""NumPy arrays to tensors of the wire, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import InvalidOperands
from .wire import DTYPES, row_major

Array: TypeAlias = NDArray[Any]

_WIDE = ("float64", "float32", "float16", "bfloat16")
FLOATS = {DTYPES[name]: name for name in (*_WIDE, "float8_e4m3fn", "float8_e5m2")}
"""What operands are made of, by dtype."""
AUX_DTYPES = {DTYPES[name]: name for name in (*_WIDE, "uint8")}
"""What a backward pass needs may be bits, too."""


def dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """The NumPy dtype, also by the names of the wire ("bfloat16")."""
    return DTYPES[dtype] if isinstance(dtype, str) and dtype in DTYPES else np.dtype(dtype)


def dtype_name(
    dtype: np.dtype[Any], operand: str, names: Mapping[np.dtype[Any], str] = FLOATS
) -> str:
    name = names.get(dtype) or names.get(dtype.newbyteorder("<"))
    if name is None:
        expected = ", ".join(names.values())
        raise InvalidOperands(
            f"{operand}: expected one of {expected}, got {dtype}", operand=operand
        )
    return name


def describe(
    array: Array, operand: str, names: Mapping[np.dtype[Any], str] = FLOATS
) -> tuple[dict[str, Any], Array]:
    """Dtype, shape and strides of `array` on the wire, and a row-major array of its bytes.

    Nothing is copied if the elements stand in one dense block, in whatever order of dimensions.
    """
    name = names.get(array.dtype)
    if name is None:
        name = dtype_name(array.dtype, operand, names)
        array = array.astype(DTYPES[name])
    tensor: dict[str, Any] = {"dtype": name, "shape": array.shape}
    if array.flags.c_contiguous:
        return tensor, array
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    block = array.transpose(order)
    if not block.flags.c_contiguous:
        return tensor, np.ascontiguousarray(array)
    strides = [0] * array.ndim
    for axis, stride in zip(order, row_major(block.shape), strict=True):
        strides[axis] = stride
    tensor["strides"] = strides
    return tensor, block


def byte_view(array: Array) -> memoryview:
    """The bytes of a row-major array."""
    return array.reshape(-1).view(np.uint8).data


def to_array(tensor: Mapping[str, Any], payloads: Sequence[memoryview]) -> Array:
    """A tensor of a reply as a writable view of its payload; copied only if it stands unaligned."""
    dtype = DTYPES[tensor["dtype"]]
    strides = tensor.get("strides")
    array: Array = np.ndarray(
        tensor["shape"],
        dtype,
        payloads[tensor["payload"]],
        strides=None if strides is None else [stride * dtype.itemsize for stride in strides],
    )
    return array if array.flags.aligned else array.copy(order="K")
