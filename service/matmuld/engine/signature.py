"""The key of a plan: everything that cuBLASLt weighs while it chooses an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matmuld_client.wire import DTYPE_NAMES, DTYPES
from pydantic import TypeAdapter

from .epilogs import TABLE, Epilog
from .protocol import Array, Operands


class Layout(NamedTuple):
    """How an operand lies in memory.

    Strides count elements; of a dimension of size 1 they are made up, so that equal layouts compare
    equal. `alignment` is the class of the address, as far as the engine's choice depends on it.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        extents = ",".join(map(str, self.shape))
        strides = ",".join(map(str, self.strides))
        return f"{self.dtype}[{extents}] strides [{strides}] align {self.alignment}"


class Options(NamedTuple):
    """The planner's options, by nvmath's names. A mask of None allows all.

    `deterministic`: only what gives the same bits every time; `split`: an epilog is a pass of its
    own, also where cuBLASLt has it.
    """

    compute_type: str
    fast_accumulation: bool = False
    sm_count_target: int = 0
    reduction_scheme_mask: int | None = None
    numerical_impl_mask: int | None = None
    deterministic: bool = False
    split: bool = False

    def describe(self) -> dict[str, Any]:
        """For people: those that are not the default."""
        defaults = self._field_defaults
        return {
            name: value for name, value in self._asdict().items() if value != defaults.get(name)
        }


class Signature(NamedTuple):
    """Pointers, alpha and beta may change between runs of a plan and stay out; C has the layout of
    D.

    `vector` is the bias or the bias gradient, `aux` the auxiliary input or output.
    """

    a: Layout
    b: Layout
    c: Layout | None
    d: Layout
    epilog: Epilog
    vector: Layout | None
    aux: Layout | None
    options: Options

    @property
    def text(self) -> str:
        """All of it as JSON; equal signatures have equal texts."""
        return _JSON.dump_json(self).decode()

    @classmethod
    def parse(cls, text: str) -> Signature:
        """The signature whose text this is. Raises ValueError if it is none's."""
        signature = _JSON.validate_json(text, strict=True)
        if signature.text != text:
            raise ValueError(f"expected the canonical text {signature.text}, got {text}")
        return signature

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        batch = self.d.shape[0] if len(self.d.shape) == 3 else 1
        return 2 * batch * self.d.shape[-2] * self.d.shape[-1] * self.a.shape[-1]

    def describe(self) -> dict[str, Any]:
        """For people: the operands that there are, and what options say."""
        return {
            "epilog": self.epilog.value,
            **self.options.describe(),
            "operands": {
                name: str(part)
                for name, part in zip(self._fields, self, strict=True)
                if isinstance(part, Layout)
            },
        }


_JSON = TypeAdapter(Signature)


class Signer:
    """Signatures of operands, for one engine.

    What operands look like repeats from request to request, so the canonical form of each look is
    kept: told by its raw shapes and strides, it is found in a third of the time it takes to make.
    """

    LIMIT = 1 << 12

    def __init__(self, alignment: Callable[[Array], int]) -> None:
        """`alignment` gives the alignment class of an array."""
        self._alignment = alignment
        self._known: dict[tuple[Any, ...], Signature] = {}

    def sign(self, operands: Operands, epilog: Epilog, options: Options) -> Signature:
        """The key of ``d = epilog(alpha · a @ b + beta · c)``."""
        o, look = operands, self._look
        raw = (
            look(o.a),
            look(o.b),
            None if o.c is None else look(o.c),
            look(o.d),
            epilog,
            None if o.vector is None else look(o.vector),
            None if o.aux is None else look(o.aux),
            options,
        )
        signature = self._known.get(raw)
        if signature is None:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            signature = self._known[raw] = _canonical(*raw)
        return signature

    def layout(self, array: Array) -> Layout:
        """How one array lies."""
        return _layout(self._look(array))

    def _look(self, array: Array) -> Look:
        return array.dtype, array.shape, array.strides, self._alignment(array)


Look = tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...], int]
"""dtype, shape, strides in bytes, alignment class"""


def _canonical(
    a: Look,
    b: Look,
    c: Look | None,
    d: Look,
    epilog: Epilog,
    vector: Look | None,
    aux: Look | None,
    options: Options,
) -> Signature:
    return Signature(
        _layout(a),
        _layout(b),
        None if c is None else _result_layout(c, epilog),
        _result_layout(d, epilog),
        epilog,
        None if vector is None else _layout(vector),
        None if aux is None else _layout(aux),
        options,
    )


def _result_layout(look: Look, epilog: Epilog) -> Layout:
    """The layout of D or C. One row is both row- and column-major: it is what the epilog needs."""
    layout = _layout(look)
    if layout.shape[-2] == 1 and TABLE[epilog].column_major:
        return layout._replace(strides=(*layout.strides[:-2], 1, 1))
    return layout


def _layout(look: Look) -> Layout:
    dtype, shape, strides, alignment = look
    steps = tuple(stride // dtype.itemsize for stride in strides)
    return Layout(DTYPE_NAMES[dtype], shape, _canonical_strides(shape, steps), alignment)


def _canonical_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in which each dimension of size 1 steps over all that lies inside it."""
    result: list[int] = []
    inner = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            stride = inner
        inner = max(inner, extent * stride)
        result.append(stride)
    return tuple(reversed(result))
