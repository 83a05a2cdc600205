"""Quantizing on the GPU: CuPy holds 8-bit floats but does not compute with them."""

from __future__ import annotations

import cupy
import numpy as np

from .float8 import FORMATS, SMALLEST_SCALE
from .protocol import Array

_amax = cupy.ReductionKernel(
    "T x",
    "float32 amax",
    "fabsf(static_cast<float>(x))",
    "a > b || isnan(a) ? a : b",
    "amax = a",
    "0.0f",
    "matmuld_amax",
)
_scale = cupy.ElementwiseKernel(
    "float32 amax, float32 most, float32 smallest",
    "float32 scale",
    "scale = amax > 0.0f ? fmaxf(amax / most, smallest) : 1.0f",
    "matmuld_scale",
)
_round = cupy.ElementwiseKernel(
    "T x, raw float32 scale, float32 most, int32 mantissa, int32 bias",
    "uint8 code",
    """
    const float value = static_cast<float>(x) / scale[0];
    const float clipped = fminf(fabsf(value), most);
    const int dropped = 23 - mantissa;
    unsigned int bits = __float_as_uint(clipped);
    if (bits >= static_cast<unsigned int>(128 - bias) << 23) {
        bits += (1u << (dropped - 1)) - 1u + ((bits >> dropped) & 1u);
        bits = (bits >> dropped) - (static_cast<unsigned int>(127 - bias) << mantissa);
    } else {
        const unsigned int unit = static_cast<unsigned int>(151 - bias - mantissa) << 23;
        bits = __float_as_uint(clipped + __uint_as_float(unit)) - unit;
    }
    code = bits | (signbit(value) ? 128u : 0u);
    """,
    "matmuld_quantize",
)
"""Rounds to the nearest, ties to even: normal numbers by the bits that are dropped, subnormal ones
by adding the number whose unit in the last place is the subnormals' step.
"""


def quantize(source: Array, values: Array) -> tuple[Array, Array]:
    """Fill `values`; the scale and the largest magnitude. See `Engine.quantize`."""
    most, mantissa, bias = FORMATS[values.dtype]
    amax = _amax(source).reshape(1)
    scale = _scale(amax, most, SMALLEST_SCALE)
    _round(source, scale, most, np.int32(mantissa), np.int32(bias), values.view(np.uint8))
    return scale, amax
