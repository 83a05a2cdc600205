"""`elementwise` on a GPU: one kernel for all that an epilog does to D, and one for sums.

Both compute in the accumulator's type, round once, and index with 64 bits. Sums are made in parts
whose number and order depend on nothing but shapes, so they come out the same every time. Kernels
are compiled when they are first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from .activations import NEGATIVE_SLOPE
from .elementwise import accumulator_dtype, as_column, swap
from .epilogs import ACTIVATION_OF, TABLE, AuxKind, Epilog, Row
from .protocol import Array, Operands
from .split import is_column_major

_SOURCE = Path(__file__).with_name("kernels.cu").read_text()
_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint8": "unsigned char",
}
_THREADS = (32, 8)
_TILE = 128
"""Elements along D's inner axis that a block does."""
_BLOCKS = 4096
"""So many keep a large GPU busy to the end."""


def finish(epilog: Epilog, product: Array, operands: Operands) -> None:
    """Apply `epilog` to ``product = alpha · a @ b``, in the accumulator's type, and write every
    output.

    `product` may be `operands.d` itself; if not, it is left as it is.
    """
    row, o = TABLE[epilog], operands
    _finish(row, product, o)
    if row.gradient == "a":
        _sum(o.a, as_column(o.vector))
    elif row.gradient == "b":
        _sum(swap(o.b), as_column(o.vector))


def pre_activation_gradient(kind: AuxKind, dy: Array, aux: Array, dz: Array) -> None:
    """dz = dy ⊙ activation'(z) for matrices ``[batch, out]``, from the aux of z."""
    _finish(Row(aux_in=kind), dy.T, Operands(None, None, dz.T, aux=aux))


def sum_rows(matrix: Array, sums: Array) -> None:
    """sums ``[out]`` = Σ matrix ``[batch, out]``"""
    _sum(matrix.T, as_column(sums))


def _finish(row: Row, product: Array, o: Operands) -> None:
    """All that the epilog makes, but for the sums of A and B."""
    *batch, m, n = product.shape
    batches = batch[0] if batch else 1
    c = o.c if o.beta else None
    sums = row.gradient == "d"
    rows_inner = row.aux_out == "relu_aux" or sums or n == 1 or (m > 1 and is_column_major(product))
    inners, outers = (m, n) if rows_inner else (n, m)
    tiles = -(-inners // _TILE)
    parts, length = _parts(tiles * batches, outers, 8)
    accumulator = accumulator_dtype(np.dtype(product.dtype))
    partial = cupy.empty((parts, batches, m), accumulator) if sums else None
    vector = None if o.vector is None else as_column(o.vector)
    arrays = (product, o.d, c, vector if row.bias else None, o.aux)
    types = (product, o.d, o.d if o.c is None else o.c, o.d if vector is None else vector, o.aux)
    kernel = _finish_kernel(
        row._replace(gradient="d" if sums else None),
        rows_inner,
        accumulator.name,
        *("uint8" if array is None else array.dtype.name for array in types),
    )
    product_steps, d_steps, c_steps, vector_steps, aux_steps = map(_steps, arrays)
    kernel(
        (tiles * parts * batches,),
        _THREADS,
        (
            *(product, *product_steps),
            *(o.d, *d_steps),
            *(c, *c_steps, float(o.beta)),
            *(arrays[3], *vector_steps),
            *(o.aux, *aux_steps),
            partial,
            *(batches, inners, outers, tiles, parts, length),
        ),
    )
    if partial is not None:
        assert vector is not None
        _sum(partial.transpose(1, 2, 0), vector if batch else vector[None])


def _sum(source: Array, sums: Array) -> None:
    """Sums of ``source (…, kept, summed)`` along its last axis, in ``sums (…, kept, 1)``, which may
    have a batch where the source has none.
    """
    kept, summed = source.shape[-2:]
    batches = sums.shape[0] if sums.ndim == 3 else 1
    accumulator = accumulator_dtype(np.dtype(source.dtype))
    source_steps = _steps(source)
    kept_inner = kept > 1 and (summed == 1 or source_steps[1] < source_steps[2])
    tiles, shortest = (-(-kept // 32), 128) if kept_inner else (-(-kept // 8), 512)
    parts, length = _parts(tiles * batches, summed, shortest)
    target, steps = sums, (0, *_steps(sums)[:2])
    if parts > 1:
        target, steps = cupy.empty((parts, batches, kept), accumulator), (batches * kept, kept, 1)
    kernel = _sum_kernel(kept_inner, accumulator.name, source.dtype.name, target.dtype.name)
    kernel(
        (tiles * parts * batches,),
        _THREADS,
        (source, *source_steps, target, *steps, kept, summed, tiles, parts, length),
    )
    if parts > 1:
        _sum(target.transpose(1, 2, 0), sums if sums.ndim == 3 else sums[None])


def _parts(blocks: int, extent: int, shortest: int) -> tuple[int, int]:
    """In how many parts, and how long ones, to divide `extent` where `blocks` blocks do each."""
    parts = max(min(-(-_BLOCKS // blocks), -(-extent // shortest)), 1)
    length = -(-extent // parts)
    return -(-extent // length), length


def _steps(array: Array | None) -> tuple[int, int, int]:
    """Elements from one batch, row and column to the next; 0 along what there is one of."""
    if array is None:
        return 0, 0, 0
    steps = [
        stride // array.itemsize if extent > 1 else 0
        for extent, stride in zip(array.shape, array.strides, strict=True)
    ]
    batch = steps[0] if len(steps) == 3 else 0
    return batch, steps[-2], steps[-1]


@cache
def _finish_kernel(
    row: Row, rows_inner: bool, accumulator: str, p: str, d: str, c: str, v: str, x: str
) -> Any:
    activation = "none" if row.aux_in is None else ACTIVATION_OF[row.aux_in]
    macros = {
        "FINISH": 1,
        "ROWS_INNER": int(rows_inner),
        "BIAS": int(row.bias),
        "MASK_OUT": int(row.aux_out == "relu_aux"),
        "AUX_OUT": int(row.aux_out not in (None, "relu_aux")),
        "MASK_IN": int(row.aux_in == "relu_aux"),
        "AUX_IN": int(row.aux_in is not None),
        "SUM_D": int(row.gradient == "d"),
        "ACTIVATION": row.activation,
        "SLOPE": f"{activation}_slope",
        "NEGATIVE_SLOPE": NEGATIVE_SLOPE,
    }
    return _compiled("finish", {"A": accumulator, "P": p, "D": d, "C": c, "V": v, "X": x}, macros)


@cache
def _sum_kernel(kept_inner: bool, accumulator: str, source: str, target: str) -> Any:
    types = {"A": accumulator, "S": source, "T": target}
    return _compiled("summation", types, {"KEPT_INNER": int(kept_inner)})


def _compiled(name: str, types: Mapping[str, str], macros: Mapping[str, object]) -> Any:
    lines = [
        "struct f16;",
        "struct bf16;",
        *(f"using {letter} = {_TYPES[dtype]};" for letter, dtype in types.items()),
        *(f"#define {macro} {value}" for macro, value in macros.items()),
    ]
    return cupy.RawKernel("\n".join([*lines, _SOURCE]), name)
