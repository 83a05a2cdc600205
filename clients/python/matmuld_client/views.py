"""Parts of tensors that the service holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from .tensors import RemoteTensor

Key: TypeAlias = int | slice | tuple[int | slice, ...]


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
        """A part of it, by integers and slices with steps above zero.

        Raises:
            IndexError: there is no such part.
        """
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.shape):
            raise IndexError(f"{len(keys)} indices for {len(self.shape)} dimensions")
        kept, offset = [], self.offset
        for part, extent, stride in zip(keys, self.shape, self.strides, strict=False):
            start, length, step = _span(part, extent)
            offset += start * stride
            if isinstance(part, slice):
                kept.append((length, step * stride))
        kept += zip(self.shape[len(keys) :], self.strides[len(keys) :], strict=True)
        shape, strides = tuple(n for n, _ in kept), tuple(stride for _, stride in kept)
        return TensorView(self.tensor, shape, strides, offset)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a view without dimensions has no length")
        return self.shape[0]


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
