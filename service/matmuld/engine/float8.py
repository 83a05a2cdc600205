"""8-bit floats: what all of an engine must know of them, and quantizing in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matmuld_client.wire import DTYPES

from .protocol import Array

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
E4M3, E5M2 = (DTYPES[name] for name in FLOAT8)
MULTIPLE = 16
"""Of elements: rows that cuBLASLt reads begin at multiples of 16 bytes."""
SMALLEST_SCALE = np.finfo(np.float32).tiny
_TILE = 1 << 20


class Format(NamedTuple):
    """An 8-bit dtype: its largest finite number, its bits of mantissa, its exponent's bias."""

    largest: np.float32
    mantissa: int
    bias: int


FORMATS = {E4M3: Format(np.float32(448), 3, 7), E5M2: Format(np.float32(57344), 2, 15)}


def is_float8(dtype: np.dtype[Any]) -> bool:
    return dtype in FORMATS


def empty(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A row-major array of NumPy or CuPy, which allocates no 8-bit floats but holds them."""
    return xp.empty(shape, np.uint8).view(dtype) if is_float8(dtype) else xp.empty(shape, dtype)


def quantize(source: Array, values: Array, scale: Array, amax: Array) -> None:
    """Fill all but the row-major `source`: see `Engine.quantize`."""
    flat, filled = source.reshape(-1), values.reshape(-1)
    tiles = [slice(start, start + _TILE) for start in range(0, flat.size, _TILE)]
    most = FORMATS[values.dtype].largest
    for tile in tiles:
        amax[0] = np.maximum(amax[0], np.abs(flat[tile].astype(np.float32)).max())
    scale[0] = max(amax[0] / most, SMALLEST_SCALE) if amax[0] > 0 else 1
    for tile in tiles:
        filled[tile] = np.clip(flat[tile].astype(np.float32) / scale[0], -most, most)
