"""Tensors of a header made operands: checked against what they name, brought to the device."""

from __future__ import annotations

import math
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matmuld_client.errors import Conflict, InvalidOperands, Malformed
from matmuld_client.wire import DIMENSIONS_LIMIT, DTYPE_NAMES, DTYPES, is_row_major, row_major

from .engine.elementwise import swap
from .engine.protocol import Array, Engine
from .memory.tensors import Resident, TensorStore
from .schemas import Tensor

FLOATS = ("float64", "float32", "float16", "bfloat16")
SOURCES = ("payload", "data", "tensor")
AUX_DTYPES = {"relu_aux": ("uint8",), "gelu_aux": FLOATS}
BYTES_LIMIT = 1 << 48
"""What an address can reach. Extents of 0 count as 1, so that no size can overflow."""


@dataclass(slots=True)
class Operand:
    """A checked tensor of a request.

    Attributes:
        name: what the header calls it, such as ``layers[1].weight``.
        strides: in elements; None if row-major.
        host: its elements in the request's body, flat, `strides` apart.
        resident: what the service holds under its handle, and `array` the value or view taken.
        described: neither: it is a shape to plan for.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    kind: str
    strides: tuple[int, ...] | None = None
    host: np.ndarray[Any, Any] | None = None
    array: Array | None = None
    resident: Resident | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    async def load(self, engine: Engine) -> Array:
        """The operand as an array on the device. Raises OutOfMemory."""
        if self.array is not None:
            return self.array
        if self.host is None:
            extent = _span(self.shape, self.strides or row_major(self.shape))
            flat = engine.empty((extent,), self.dtype)
        else:
            flat = await engine.upload(self.host)
        if self.strides is None:
            return flat.reshape(self.shape)
        return engine.view(flat, self.shape, self.strides)

    def expect(self, shape: tuple[int, ...], meaning: str) -> None:
        """Raise InvalidOperands unless the shape is `shape`."""
        if self.shape != shape:
            raise InvalidOperands(
                f"{self.name}: expected shape {shape} ({meaning}), got {self.shape}",
                operand=self.name,
            )

    def expect_dtype(self, dtype: np.dtype[Any], why: str) -> None:
        """Raise InvalidOperands unless the dtype is `dtype`."""
        if self.dtype != dtype:
            raise InvalidOperands(
                f"{self.name}: expected dtype {dtype.name} ({why}), got {self.dtype.name}",
                operand=self.name,
            )

    def reject(self, problem: str) -> InvalidOperands:
        """An error about this operand."""
        return InvalidOperands(f"{self.name}: {problem}", operand=self.name)


class Inputs:
    """The tensors of one request's header, and the payloads they name."""

    def __init__(
        self,
        engine: Engine,
        store: TensorStore,
        tenant: str,
        payloads: Sequence[memoryview],
        *,
        sourceless: bool = False,
    ) -> None:
        self._engine = engine
        self._store = store
        self._tenant = tenant
        self._payloads = payloads
        self._unnamed = set(range(len(payloads)))
        self._sourceless = sourceless

    def take(self, name: str, tensor: Tensor, dtypes: Sequence[str] = FLOATS) -> Operand:
        """Check `tensor` by itself; `dtypes` are those that its place allows.

        Raises:
            Malformed: it has not one source, or its payload is not there.
            InvalidOperands: its dtype, shape, strides or size is wrong.
            UnknownHandle, Gone: its handle names nothing.
        """
        handle = tensor.tensor
        sources = (tensor.payload is not None) + (tensor.data is not None) + (handle is not None)
        if sources != (0 if self._sourceless and handle is None else 1):
            raise self._wrong_sources(name, tensor)
        if handle is not None:
            return self._held(name, tensor, handle, dtypes)
        if tensor.offset:
            raise InvalidOperands(
                f"{name}: expected an offset with a handle only, got {tensor.offset}", operand=name
            )
        dtype, shape = described(name, tensor.dtype, tensor.shape, dtypes)
        strides = _checked_strides(name, shape, tensor.strides)
        operand = Operand(name, dtype, shape, tensor.kind or "tensor", strides)
        if not self._sourceless:
            operand.host = _elements(operand, self._bytes(name, tensor))
        return operand

    def _wrong_sources(self, name: str, tensor: Tensor) -> Malformed:
        expected = "no payload or data" if self._sourceless else "exactly one source"
        given = [source for source in SOURCES if getattr(tensor, source) is not None]
        return Malformed(
            f"{name}: expected {expected}, got {' and '.join(given) or 'none'}", operand=name
        )

    def finish(self) -> None:
        """Raise Malformed if a payload was not named by the header."""
        if self._unnamed:
            raise Malformed(
                f"payload {min(self._unnamed)}: expected a tensor that names it, there is none"
            )

    def _bytes(self, name: str, tensor: Tensor) -> memoryview:
        if tensor.data is not None:
            try:
                return memoryview(b64decode(tensor.data, validate=True))
            except (Base64Error, ValueError) as error:
                raise Malformed(f"{name}: expected base64 in data: {error}", operand=name) from None
        index = tensor.payload
        assert index is not None
        if not 0 <= index < len(self._payloads):
            raise Malformed(
                f"{name}: expected a payload index below {len(self._payloads)}, got {index}",
                operand=name,
            )
        self._unnamed.discard(index)
        return self._payloads[index]

    def _held(self, name: str, tensor: Tensor, handle: str, dtypes: Sequence[str]) -> Operand:
        resident = self._store.get(self._tenant, handle, name)
        if resident.kind == "tape":
            raise Conflict(f"{name}: expected a tensor, {handle} is a tape", operand=name)
        value = resident.value
        dtype, shape = value.dtype, value.shape
        dtype_name = DTYPE_NAMES[dtype]
        if dtype_name not in dtypes:
            raise InvalidOperands(
                f"{name}: expected dtype {' or '.join(dtypes)}, the tensor has {dtype.name}",
                operand=name,
            )
        _expect_same(name, "dtype", tensor.dtype, dtype_name)
        _expect_same(name, "kind", tensor.kind, resident.kind)
        operand = Operand(name, dtype, shape, resident.kind, array=value, resident=resident)
        if tensor.strides is None and not tensor.offset:
            _expect_same(name, "shape", tensor.shape, list(shape))
        else:
            _take_view(self._engine, operand, tensor)
        return operand


def described(
    name: str, dtype: str | None, shape: Sequence[int] | None, dtypes: Sequence[str]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """A dtype and shape, checked by themselves."""
    if dtype is None or shape is None:
        missing = "dtype" if dtype is None else "shape"
        raise Malformed(f"{name}: expected a {missing}, it is missing", operand=name)
    if dtype not in dtypes:
        raise InvalidOperands(
            f"{name}: expected dtype {' or '.join(dtypes)}, got {dtype[:40]!r}", operand=name
        )
    if len(shape) > DIMENSIONS_LIMIT:
        raise Malformed(
            f"{name}: expected at most {DIMENSIONS_LIMIT} dimensions, got {len(shape)}",
            operand=name,
        )
    if any(extent < 0 for extent in shape):
        raise InvalidOperands(f"{name}: expected extents ≥ 0, got {list(shape)}", operand=name)
    element = DTYPES[dtype]
    check_bytes(name, shape, element)
    return element, tuple(shape)


def check_bytes(name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise InvalidOperands if the shape is one that no memory holds."""
    if math.prod(extent or 1 for extent in shape) * dtype.itemsize > BYTES_LIMIT:
        raise InvalidOperands(
            f"{name}: expected at most 2^48 bytes, shape {list(shape)} of {dtype.name} has more",
            operand=name,
        )


def _expect_same(name: str, what: str, said: object, held: object) -> None:
    if said is not None and said != held:
        raise InvalidOperands(
            f"{name}: expected {what} {held}, which the tensor has, got {said}", operand=name
        )


def _checked_strides(
    name: str, shape: tuple[int, ...], strides: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Strides that are none of row-major, negative or overlapping; None for row-major."""
    if strides is None:
        return None
    if len(strides) != len(shape):
        raise InvalidOperands(
            f"{name}: expected {len(shape)} strides for shape {list(shape)}, got {list(strides)}",
            operand=name,
        )
    if any(stride < 0 for stride in strides):
        raise InvalidOperands(f"{name}: expected strides ≥ 0, got {list(strides)}", operand=name)
    if is_row_major(shape, strides):
        return None
    reach = 0
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                raise InvalidOperands(
                    f"{name}: expected elements that do not overlap, "
                    f"got strides {list(strides)} for shape {list(shape)}",
                    operand=name,
                )
            reach += stride * (extent - 1)
    return tuple(strides)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def _elements(operand: Operand, data: memoryview) -> np.ndarray[Any, Any]:
    """The bytes of a payload as elements. Raises InvalidOperands for too few or too many."""
    itemsize = operand.dtype.itemsize
    if operand.strides is None:
        needed = operand.size * itemsize
        if len(data) != needed:
            raise operand.reject(
                f"expected {needed} bytes for shape {list(operand.shape)} of {operand.dtype.name}, "
                f"got {len(data)}"
            )
    else:
        needed = _span(operand.shape, operand.strides) * itemsize
        if len(data) < needed or len(data) % itemsize:
            raise operand.reject(
                f"expected {needed} bytes or more, in whole elements, "
                f"for shape {list(operand.shape)} with strides {list(operand.strides)}, "
                f"got {len(data)}"
            )
    return np.frombuffer(data, operand.dtype)


def _take_view(engine: Engine, operand: Operand, tensor: Tensor) -> None:
    """Make `operand`, a whole resident so far, the view of it that the header describes."""
    name, held = operand.name, operand.array
    assert held is not None
    shape = operand.shape if tensor.shape is None else tuple(tensor.shape)
    described(name, operand.dtype.name, shape, (operand.dtype.name,))
    strides = _checked_strides(name, shape, tensor.strides) or row_major(shape)
    end = tensor.offset + _span(shape, strides)
    if tensor.offset < 0 or end > held.size:
        raise operand.reject(
            f"expected a view within the tensor's {held.size} elements, got "
            f"elements {tensor.offset} to {end - 1} by shape {list(shape)}, "
            f"strides {list(strides)} and offset {tensor.offset}"
        )
    base = held if held.flags.c_contiguous else swap(held)
    operand.array = engine.view(base, shape, strides, tensor.offset)
    operand.shape, operand.kind = shape, "tensor"
