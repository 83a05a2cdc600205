"""Plans around another plan, for what cuBLASLt cannot fuse or read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from . import elementwise
from .elementwise import in_turn
from .epilogs import TABLE, Epilog
from .float8 import empty, is_float8
from .protocol import Array, Launch, Operands, Plan


class SplitPlan:
    """A plain product, then the epilog as elementwise passes."""

    path = "split"

    def __init__(
        self,
        xp: Any,
        finishing: Callable[[Epilog, Array, Operands], list[Launch]],
        epilog: Epilog,
        plain: Plan,
    ) -> None:
        """`finishing` is `elementwise.finishing` for the arrays of `xp`."""
        self._xp = xp
        self._finishing = finishing
        self._epilog = epilog
        self._plain = plain
        self.nbytes = plain.nbytes
        self.brief = plain.brief
        if plain.path != "fused":
            self.path = f"split, {plain.path}"

    def _product(self, operands: Operands) -> Operands:
        return without_epilog(operands, product_of(self._xp, self._epilog, operands))

    def bind(self, operands: Operands, *, aside: bool = False) -> Launch:
        plain = self._product(operands)
        multiply = self._plain.bind(plain, aside=aside)
        return partial(in_turn, [multiply, *self._finishing(self._epilog, plain.d, operands)])

    def variants(self, operands: Operands) -> list[Launch]:
        return self._plain.variants(self._product(operands))

    def take(self, index: int, operands: Operands) -> None:
        self._plain.take(index, self._product(operands))

    def record(self) -> tuple[str, dict[str, Any]] | None:
        return self._plain.record()

    def close(self) -> None:
        self._plain.close()


class StagedPlan:
    """A product some of whose inputs are first copied into dense, aligned memory."""

    path = "staged"

    def __init__(self, xp: Any, inner: Plan, names: Sequence[str]) -> None:
        self._xp = xp
        self._inner = inner
        self._names = names
        self.nbytes = inner.nbytes
        self.brief = inner.brief
        if inner.path != "fused":
            self.path = f"staged, {inner.path}"

    def bind(self, operands: Operands, *, aside: bool = False) -> Launch:
        dense = staging(self._xp, operands, self._names)
        multiply = self._inner.bind(dense, aside=aside)

        def launch() -> None:
            stage(dense, operands, self._names)
            multiply()

        return launch

    def variants(self, operands: Operands) -> list[Launch]:
        return self._inner.variants(self._dense(operands))

    def take(self, index: int, operands: Operands) -> None:
        self._inner.take(index, self._dense(operands))

    def record(self) -> tuple[str, dict[str, Any]] | None:
        return self._inner.record()

    def _dense(self, operands: Operands) -> Operands:
        dense = staging(self._xp, operands, self._names)
        stage(dense, operands, self._names)
        return dense

    def close(self) -> None:
        self._inner.close()


def is_column_major(array: Array) -> bool:
    """Whether consecutive elements go down a column."""
    return bool(array.ndim > 1 and array.strides[-2] < array.strides[-1])


def product_of(xp: Any, epilog: Epilog, operands: Operands) -> Array:
    """D itself if the product may be rounded before the epilog, else an array of the accumulator's
    type with D's layout.
    """
    d = operands.d
    dtype = elementwise.accumulator_dtype(np.dtype(d.dtype))
    if d.dtype == dtype or (operands.c is None and commutes_with_rounding(epilog)):
        return d
    if is_column_major(d):
        return elementwise.swap(xp.empty(elementwise.swap(d).shape, dtype))
    return xp.empty(d.shape, dtype)


def commutes_with_rounding(epilog: Epilog) -> bool:
    """Whether D is the same if the product is rounded first: it is kept or set to 0."""
    row = TABLE[epilog]
    kept_or_0 = row.activation in ("none", "relu") and row.aux_in in (None, "relu_aux")
    return kept_or_0 and not row.bias and row.aux_out is None


def without_epilog(operands: Operands, product: Array) -> Operands:
    """The operands of the product alone."""
    o = operands
    return Operands(o.a, o.b, product, alpha=o.alpha, scale_a=o.scale_a, scale_b=o.scale_b)


def staging(xp: Any, operands: Operands, names: Sequence[str]) -> Operands:
    """The operands with dense memory for those named, each in its own orientation; C in the layout
    of D, and 8-bit floats as cuBLASLt wants them, with consecutive elements along K.
    """
    copies: dict[str, Array] = {}
    for name in names:
        array = getattr(operands, name)
        column_major = is_column_major(operands.d if name == "c" else array)
        if is_float8(array.dtype):
            column_major = name == "b"
        if column_major:
            copies[name] = elementwise.swap(empty(xp, elementwise.swap(array).shape, array.dtype))
        else:
            copies[name] = empty(xp, array.shape, array.dtype)
    return replace(operands, **copies)


def stage(dense: Operands, operands: Operands, names: Sequence[str]) -> None:
    """Copy the elements of the operands named."""
    for name in names:
        elementwise.assign(getattr(dense, name), getattr(operands, name))
