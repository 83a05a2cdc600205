"""The epilogs without cuBLASLt, in NumPy: the definition of what `kernels` does on a GPU.

Everything is computed in the accumulator's type (float32, or float64 for float64) and rounded once.
Where cuBLASLt had a choice we follow it, as measured on an H200: the mask bit of 0 is set, and so
is that of NaN; ReLU passes NaN on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from . import activations
from .epilogs import ACTIVATION_OF, TABLE, AuxKind, Epilog, Row, aux_rows
from .float8 import is_float8
from .protocol import Array, Engine, Launch, Operands

TILE_BYTES = 1 << 25


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what type the elements of `dtype` are summed."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def swap(array: Array) -> Array:
    """The matrices of a batch transposed."""
    return array.swapaxes(-1, -2)


def copyable(array: Array) -> Array:
    """The array; if its elements are 8-bit floats, which CuPy holds but does not copy, as bytes."""
    return array.view(np.uint8) if is_float8(array.dtype) else array


def reshape(array: Array, *shape: int) -> Array:
    """The array in another shape, copied if it must be."""
    if is_float8(array.dtype):
        return array.view(np.uint8).reshape(shape).view(array.dtype)
    return array.reshape(shape)


def assign(target: Array, source: Array) -> None:
    """Copy elements of one dtype, broadcasting."""
    copyable(target)[...] = copyable(source)


def empty_like(engine: Engine, array: Array) -> Array:
    """A new array of that shape and layout, which is row- or column-major."""
    if array.flags.c_contiguous:
        return engine.empty(array.shape, array.dtype)
    return swap(engine.empty(swap(array).shape, array.dtype))


def write_mask(passes: Array, aux: Array) -> None:
    """Pack ``passes (…, M, N)`` into a relu_aux ``(…, R, N)``: least significant bit first, along
    M.
    """
    columns = swap(passes)
    bits = aux.shape[-2] * 8
    if columns.shape[-1] != bits:
        padded = np.zeros((*columns.shape[:-1], bits), dtype=bool)
        padded[..., : columns.shape[-1]] = columns
        columns = padded
    packed = np.packbits(np.ascontiguousarray(columns).reshape(-1), bitorder="little")
    swap(aux)[...] = packed.reshape(*columns.shape[:-1], aux.shape[-2])


def read_mask(xp: Any, aux: Array, m: int) -> Array:
    """The mask ``(…, m, N)``, 0 or 1, of a relu_aux ``(…, R, N)``."""
    columns = xp.ascontiguousarray(swap(aux))
    bits = xp.unpackbits(columns.reshape(-1), bitorder="little")
    return swap(bits.reshape(*columns.shape[:-1], columns.shape[-1] * 8)[..., :m])


def activation_gradient(kind: AuxKind, gradient: Array, aux: Array) -> Array:
    """``gradient ⊙ activation'(z)`` for gradient ``(…, M, N)`` in the accumulator's type."""
    m = gradient.shape[-2]
    if kind == "relu_aux":
        return np.where(read_mask(np, aux, m) != 0, gradient, gradient.dtype.type(0))
    derivative = activations.DERIVATIVES[ACTIVATION_OF[kind]]
    return gradient * derivative(aux[..., :m, :].astype(gradient.dtype))


def masking(kind: AuxKind, dy: Array, aux: Array, dz: Array) -> Launch:
    """dz = dy ⊙ activation'(z) for matrices ``[batch, out]``, from the aux of z; bound."""
    return partial(_mask, kind, dy, aux, dz)


def _mask(kind: AuxKind, dy: Array, aux: Array, dz: Array) -> None:
    dtype = accumulator_dtype(dy.dtype)
    for part in tiles(dy.T):
        gradient = dy.T[:, part].astype(dtype)
        dz.T[:, part] = activation_gradient(kind, gradient, aux[:, part])


def summing(matrix: Array, sums: Array) -> Launch:
    """sums ``[out]`` = Σ matrix ``[batch, out]``; bound."""
    return partial(_sum_rows, matrix, sums)


def _sum_rows(matrix: Array, sums: Array) -> None:
    dtype = accumulator_dtype(matrix.dtype)
    sums[...] = matrix.astype(dtype, copy=False).sum(axis=0)


def tiles(array: Array) -> Iterator[slice]:
    """Columns at a time, so that temporaries stay small whatever the array's size."""
    columns = array.shape[-1]
    step = max(TILE_BYTES * columns // max(array.nbytes, 1), 1)
    for start in range(0, columns, step):
        yield slice(start, start + step)


def in_turn(launches: Sequence[Launch]) -> None:
    """Make these launches one after the other."""
    for launch in launches:
        launch()


def finishing(epilog: Epilog, product: Array, operands: Operands) -> list[Launch]:
    """`finish` on these arrays, bound; a bias and a ReLU in place are a pass each."""
    row, o = TABLE[epilog], operands
    short = row.activation in ("none", "relu") and row.aux is None and row.gradient is None
    if not short or product is not o.d or o.c is not None:
        return [partial(finish, epilog, product, o)]
    launches: list[Launch] = []
    if row.bias:
        launches.append(partial(np.add, product, as_column(o.vector), out=product))
    if row.activation == "relu":
        launches.append(partial(np.maximum, product, product.dtype.type(0), out=product))
    return launches


def finish(epilog: Epilog, product: Array, operands: Operands) -> None:
    """Apply `epilog` to ``product = alpha · a @ b``, in the accumulator's type, and write every
    output.

    `product` may be `operands.d` itself.
    """
    row, o = TABLE[epilog], operands
    if product.nbytes <= TILE_BYTES:
        _finish_tile(row, product, o, in_place=product is o.d)
    else:
        for part in tiles(product):
            tile = replace(
                o,
                d=o.d[..., part],
                c=None if o.c is None else o.c[..., part],
                aux=None if o.aux is None else o.aux[..., part],
            )
            _finish_tile(row, product[..., part], tile, in_place=product is o.d)
    if row.gradient is not None:
        summed, axis = {"d": (product, -1), "a": (o.a, -1), "b": (o.b, -2)}[row.gradient]
        total = summed.astype(product.dtype, copy=False).sum(axis=axis)
        assert o.vector is not None
        o.vector[...] = total if o.vector.ndim == 1 else total[..., None]


def _finish_tile(row: Row, product: Array, o: Operands, *, in_place: bool) -> None:
    """Some columns of all that the epilog makes, but for its sums."""
    dtype = product.dtype
    if o.c is not None and o.beta:
        product += dtype.type(o.beta) * o.c.astype(dtype, copy=False)
    if row.bias:
        product += as_column(o.vector).astype(dtype, copy=False)
    if row.aux_out == "relu_aux":
        write_mask(~(product < 0), o.aux)
    elif row.aux_out is not None:
        assert o.aux is not None
        o.aux[..., : product.shape[-2], :] = product
    if row.activation != "none":
        product[...] = activations.FUNCTIONS[row.activation](product)
    if row.aux_in is not None:
        product[...] = activation_gradient(row.aux_in, product, o.aux)
    if not in_place:
        o.d[...] = product


def as_column(vector: Array) -> Array:
    """A bias ``(M,)`` as ``(M, 1)``; ``(…, M, 1)`` as it is."""
    return vector[:, None] if vector.ndim == 1 else vector


def aux_shape(kind: AuxKind, d_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the aux of D, padded as cuBLASLt pads it; its layout is column-major within each
    matrix.
    """
    return (*d_shape[:-2], aux_rows(kind, d_shape[-2]), d_shape[-1])
