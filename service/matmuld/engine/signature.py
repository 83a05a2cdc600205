"""The key of a plan: everything that cuBLASLt weighs while it chooses an algorithm."""

from __future__ import annotations

from typing import Any, NamedTuple

from matmuld_client.wire import DTYPE_NAMES

from .epilogs import TABLE, Epilog
from .protocol import Array, Operands


class Layout(NamedTuple):
    """How an operand lies in memory.

    Strides count elements; of a dimension of size 1 they are made up, so that equal layouts compare
    equal.
    `alignment` is the class of the address: the largest power of two, up to the engine's cap, that
    divides it.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    def __str__(self) -> str:
        extents = ",".join(map(str, self.shape))
        strides = ",".join(map(str, self.strides))
        return f"{self.dtype}[{extents}] strides [{strides}] align {self.alignment}"


class Options(NamedTuple):
    """The planner's options, by nvmath's names. A mask of None allows all."""

    compute_type: str
    fast_accumulation: bool = False
    sm_count_target: int = 0
    reduction_scheme_mask: int | None = None
    numerical_impl_mask: int | None = None


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
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        batch = self.d.shape[0] if len(self.d.shape) == 3 else 1
        return 2 * batch * self.d.shape[-2] * self.d.shape[-1] * self.a.shape[-1]

    @classmethod
    def of(cls, operands: Operands, epilog: Epilog, options: Options, alignment: int) -> Signature:
        """The key of ``d = epilog(alpha · a @ b + beta · c)``; `alignment` caps the class."""
        o = operands
        d = layout(o.d, alignment)
        if d.shape[-2] == 1 and TABLE[epilog].column_major:
            d = d._replace(strides=(*d.strides[:-2], 1, 1))
        return cls(
            layout(o.a, alignment),
            layout(o.b, alignment),
            None if o.c is None else layout(o.c, alignment),
            d,
            epilog,
            None if o.vector is None else layout(o.vector, alignment),
            None if o.aux is None else layout(o.aux, alignment),
            options,
        )

    def describe(self) -> dict[str, Any]:
        """For people: the operands that there are, and the options that are not the default."""
        defaults = Options._field_defaults
        options = self.options._asdict().items()
        return {
            "epilog": self.epilog.value,
            **{name: value for name, value in options if value != defaults.get(name)},
            "operands": {
                name: str(part)
                for name, part in zip(self._fields, self, strict=True)
                if isinstance(part, Layout)
            },
        }


def layout(array: Array, cap: int) -> Layout:
    """The layout of an array, in canonical form."""
    itemsize = array.itemsize
    shape = array.shape
    strides = tuple([stride // itemsize for stride in array.strides])
    if 1 in shape:
        strides = _canonical(shape, strides)
    return Layout(DTYPE_NAMES[array.dtype], shape, strides, alignment_class(pointer(array), cap))


def _canonical(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in which each dimension of size 1 steps over all that lies inside it."""
    result: list[int] = []
    inner = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            stride = inner
        inner = max(inner, extent * stride)
        result.append(stride)
    return tuple(reversed(result))


def pointer(array: Array) -> int:
    """The address of the first element."""
    if hasattr(array, "__cuda_array_interface__"):
        return int(array.data.ptr)
    return int(array.__array_interface__["data"][0])


def alignment_class(address: int, cap: int) -> int:
    """The largest power of two that divides `address`, at most `cap`."""
    return min(address & -address, cap) if address else cap
