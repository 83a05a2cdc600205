"""The epilogs without cuBLASLt: elementwise steps written once for NumPy and CuPy.

Everything is computed in the accumulator's type (float32, or float64 for float64) and rounded once.
Where cuBLASLt had a choice we follow it, as measured on an H200: the mask bit of 0 is set, and so
is that of NaN; ReLU passes NaN on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .epilogs import TABLE, AuxKind, Epilog, Row, aux_rows
from .protocol import Array, Engine, Launch, Operands

TILE_BYTES = 1 << 25
_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what type the elements of `dtype` are summed."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def gelu(xp: Any, z: Array) -> Array:
    """GELU in the tanh form, ``z/2 · (1 + tanh(√(2/π) · (z + 0.044715 z³)))`` (Hendrycks & Gimpel
    2016).
    """
    return 0.5 * z * (1.0 + xp.tanh(_GELU_SCALE * (z + _GELU_CUBIC * z * z * z)))


def gelu_derivative(xp: Any, z: Array) -> Array:
    """The derivative of `gelu` at z."""
    t = xp.tanh(_GELU_SCALE * (z + _GELU_CUBIC * z * z * z))
    inner = _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBIC * z * z)
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner


def swap(array: Array) -> Array:
    """The matrices of a batch transposed."""
    return array.swapaxes(-1, -2)


def assign(target: Array, source: Array) -> None:
    """Copy elements, broadcasting."""
    target[...] = source


def empty_like(engine: Engine, array: Array) -> Array:
    """A new array of that shape and layout, which is row- or column-major."""
    if array.flags.c_contiguous:
        return engine.empty(array.shape, array.dtype)
    return swap(engine.empty(swap(array).shape, array.dtype))


def write_mask(xp: Any, passes: Array, aux: Array) -> None:
    """Pack ``passes (…, M, N)`` into a relu_aux ``(…, R, N)``: least significant bit first, along
    M.
    """
    columns = swap(passes)
    bits = aux.shape[-2] * 8
    if columns.shape[-1] != bits:
        padded = xp.zeros((*columns.shape[:-1], bits), dtype=bool)
        padded[..., : columns.shape[-1]] = columns
        columns = padded
    packed = xp.packbits(xp.ascontiguousarray(columns).reshape(-1), bitorder="little")
    swap(aux)[...] = packed.reshape(*columns.shape[:-1], aux.shape[-2])


def read_mask(xp: Any, aux: Array, m: int) -> Array:
    """The mask ``(…, m, N)``, 0 or 1, of a relu_aux ``(…, R, N)``."""
    columns = xp.ascontiguousarray(swap(aux))
    bits = xp.unpackbits(columns.reshape(-1), bitorder="little")
    return swap(bits.reshape(*columns.shape[:-1], columns.shape[-1] * 8)[..., :m])


def activation_gradient(xp: Any, kind: AuxKind, gradient: Array, aux: Array) -> Array:
    """``gradient ⊙ activation'(z)`` for gradient ``(…, M, N)`` in the accumulator's type."""
    m = gradient.shape[-2]
    if kind == "relu_aux":
        return xp.where(read_mask(xp, aux, m) != 0, gradient, gradient.dtype.type(0))
    return gradient * gelu_derivative(xp, aux[..., :m, :].astype(gradient.dtype))


def tiles(array: Array) -> Iterator[slice]:
    """Columns at a time, so that temporaries stay small whatever the array's size."""
    columns = array.shape[-1]
    step = max(TILE_BYTES * columns // max(array.nbytes, 1), 1)
    for start in range(0, columns, step):
        yield slice(start, start + step)


def finishing(xp: Any, epilog: Epilog, product: Array, operands: Operands) -> list[Launch]:
    """`finish` on these arrays, bound; a bias and a ReLU in place are a pass each."""
    row, o = TABLE[epilog], operands
    short = row.activation in ("none", "relu") and row.aux is None and row.gradient is None
    if not short or product is not o.d or o.c is not None:
        return [partial(finish, xp, epilog, product, o)]
    launches: list[Launch] = []
    if row.bias:
        launches.append(partial(xp.add, product, as_column(o.vector), out=product))
    if row.activation == "relu":
        launches.append(partial(xp.maximum, product, product.dtype.type(0), out=product))
    return launches


def finish(xp: Any, epilog: Epilog, product: Array, operands: Operands) -> None:
    """Apply `epilog` to ``product = alpha · a @ b``, in the accumulator's type, and write every
    output.

    `product` may be `operands.d` itself.
    """
    row, o = TABLE[epilog], operands
    if product.nbytes <= TILE_BYTES:
        _finish_tile(xp, row, product, o, in_place=product is o.d)
    else:
        for part in tiles(product):
            tile = replace(
                o,
                d=o.d[..., part],
                c=None if o.c is None else o.c[..., part],
                aux=None if o.aux is None else o.aux[..., part],
            )
            _finish_tile(xp, row, product[..., part], tile, in_place=product is o.d)
    if row.gradient is not None:
        summed, axis = {"d": (product, -1), "a": (o.a, -1), "b": (o.b, -2)}[row.gradient]
        total = summed.astype(product.dtype, copy=False).sum(axis=axis)
        assert o.vector is not None
        o.vector[...] = total if o.vector.ndim == 1 else total[..., None]


def _finish_tile(xp: Any, row: Row, product: Array, o: Operands, *, in_place: bool) -> None:
    """Some columns of all that the epilog makes, but for its sums."""
    dtype = product.dtype
    if o.c is not None and o.beta:
        product += dtype.type(o.beta) * o.c.astype(dtype, copy=False)
    if row.bias:
        product += as_column(o.vector).astype(dtype, copy=False)
    if row.aux_out == "relu_aux":
        write_mask(xp, ~(product < 0), o.aux)
    elif row.aux_out == "gelu_aux":
        assert o.aux is not None
        o.aux[..., : product.shape[-2], :] = product
    if row.activation == "relu":
        xp.maximum(product, dtype.type(0), out=product)
    elif row.activation == "gelu":
        product[...] = gelu(xp, product)
    if row.aux_in is not None:
        product[...] = activation_gradient(xp, row.aux_in, product, o.aux)
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
