"""Parts of tensors that the service holds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from operator import index
from types import EllipsisType
from typing import TYPE_CHECKING, NoReturn, SupportsIndex, TypeAlias

import numpy as np

from ._payloads import Array

if TYPE_CHECKING:
    from .tensors import RemoteTensor

Index: TypeAlias = SupportsIndex | slice
Key: TypeAlias = Index | EllipsisType | tuple[Index | EllipsisType, ...]


@dataclass(frozen=True)
class TensorView:
    """A view of a `RemoteTensor`, which is an operand like the tensor itself; nothing is copied.

    Attributes:
        tensor: what it is a view of, and keeps from being freed by collection.
        shape: its dimensions.
        strides: in elements.
        offset: in elements, from the tensor's first.
    """

    tensor: RemoteTensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def T(self) -> TensorView:
        """The view with all dimensions in reverse, as in NumPy."""
        return TensorView(self.tensor, self.shape[::-1], self.strides[::-1], self.offset)

    @property
    def mT(self) -> TensorView:
        """The view with the last two dimensions exchanged."""
        *batch, rows, columns = range(len(self.shape))
        order = (*batch, columns, rows)
        shape = tuple(self.shape[axis] for axis in order)
        strides = tuple(self.strides[axis] for axis in order)
        return TensorView(self.tensor, shape, strides, self.offset)

    def __getitem__(self, key: Key) -> TensorView:
        """A part of it, by integers, slices with steps above zero, and an ellipsis.

        Raises:
            IndexError: there is no such part.
            TypeError: the index is of another kind.
        """
        kept, offset = [], self.offset
        indices = _for_each_dimension(key, len(self.shape))
        for part, extent, stride in zip(indices, self.shape, self.strides, strict=True):
            start, length, step = _span(part, extent)
            offset += start * stride
            if isinstance(part, slice):
                kept.append((length, step * stride))
        shape, strides = tuple(n for n, _ in kept), tuple(stride for _, stride in kept)
        return TensorView(self.tensor, shape, strides, offset)

    def numpy(self, *, timeout: float | None = None) -> Array:
        """What it shows, row-major, in memory of its own; the whole tensor is fetched for it.

        Args:
            timeout: seconds; default: the client's.

        Raises:
            Gone: the tensor was freed or has expired.
        """
        whole, itemsize = self.tensor, self.tensor.dtype.itemsize
        memory = np.empty(whole.nbytes, np.uint8)
        held = [stride * itemsize for stride in whole.strides]
        np.ndarray(whole.shape, whole.dtype, memory, 0, held)[...] = whole.numpy(timeout=timeout)
        shown = [stride * itemsize for stride in self.strides]
        offset = self.offset * itemsize
        view: Array = np.ndarray(self.shape, whole.dtype, memory, offset, shown)
        return view.copy()

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise TypeError("a TensorView is not fetched implicitly; call numpy()")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a view without dimensions has no length")
        return self.shape[0]


def _for_each_dimension(key: Key, dimensions: int) -> list[int | slice]:
    """One index for each dimension: an ellipsis, and what is left out, stand for whole ones."""
    keys = key if isinstance(key, tuple) else (key,)
    at = next((i for i, part in enumerate(keys) if part is ...), len(keys))
    before, after = list(map(_index, keys[:at])), list(map(_index, keys[at + 1 :]))
    left = dimensions - len(before) - len(after)
    if left < 0:
        raise IndexError(f"{dimensions - left} indices for {dimensions} dimensions")
    return [*before, *[slice(None)] * left, *after]


def _index(part: Index | EllipsisType) -> int | slice:
    if isinstance(part, slice):
        return part
    if isinstance(part, SupportsIndex) and not isinstance(part, bool | np.bool_):
        with suppress(TypeError):  # an array of several
            return index(part)
    raise TypeError(
        "only integers, slices (`:`) and one ellipsis (`...`) are valid indices, "
        f"got {type(part).__name__}"
    )


def _span(part: int | slice, extent: int) -> tuple[int, int, int]:
    """Where the elements of `part` begin, how many there are, and how far apart."""
    if isinstance(part, slice):
        start, stop, step = part.indices(extent)
        if step < 0:
            raise IndexError(f"a view cannot run backwards, its step is {step}")
        length = len(range(start, stop, step))
        return (start if length else 0), length, step
    if not -extent <= part < extent:
        raise IndexError(f"index {part} is out of range for {extent} elements")
    return part % extent, 1, 1
