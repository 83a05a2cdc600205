"""Whether two algorithms, or two ways, agree: what another than the first must pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .elementwise import accumulator_dtype, tiles
from .float8 import FLOAT8
from .protocol import Array
from .signature import Options

_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Four roundings of the 16-bit types; of the longer ones a sum in another order may lose more."""
_ROUGH = 2e-2
"""Where inputs are rounded, or sums are kept in 16 bits or, of 8-bit products, not much more."""
_EIGHT_BITS = 0.25


def tolerance(operand: str, dtype: str, options: Options) -> float:
    """How far two results of `dtype`, of operands of another, may be apart, as a part of the
    largest element.
    """
    own = _TOLERANCES.get(dtype, _EIGHT_BITS)
    compute_type = options.compute_type
    rough = "FAST" in compute_type or "16F" in compute_type or operand in FLOAT8
    return max(own, _ROUGH) if rough else own


def poison(array: Array) -> None:
    """Fill with NaN, so that what is not written is found out."""
    bits = array.view(f"u{array.itemsize}")
    bits[...] = bits.dtype.type(np.iinfo(bits.dtype).max)


def difference(xp: Any, expected: Array, got: Array) -> float:
    """The largest difference between elements, as a part of the largest one that is finite.

    The same infinity in both is no difference, and neither is NaN in both.
    """
    dtype = accumulator_dtype(np.dtype(expected.dtype))
    worst = largest = 0.0
    for part in tiles(expected):
        e, g = expected[..., part].astype(dtype), got[..., part].astype(dtype)
        with np.errstate(all="ignore"):
            delta = xp.abs(g - e)
        delta[xp.isnan(delta)] = math.inf
        delta[(e == g) | (xp.isnan(e) & xp.isnan(g))] = 0
        e[~xp.isfinite(e)] = 0
        worst = max(worst, float(delta.max()))
        largest = max(largest, float(xp.abs(e).max()))
    if worst == 0:
        return 0.0
    return worst / largest if largest else math.inf
