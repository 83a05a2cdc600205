"""The elementwise halves of split steps, one kernel each."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy

from .device import Array

_RELU_AND_MASK = """
const long long column = i / rows, first = (i % rows) * 8;
unsigned char bits = 0;
for (int bit = 0; bit < 8; ++bit) {
  const long long row = first + bit;
  if (row < m) {
    const long long at = column * m + row;
    const float z = float(y[at]) + float(bias[row]);
    bits |= (z < 0.0f ? 0 : 1) << bit;
    y[at] = T(z < 0.0f ? 0.0f : z);
  }
}
aux = bits;
"""
_MASK = """
const long long row = i % m;
if (!((aux[i / m * rows + row / 8] >> (row % 8)) & 1)) dx = T(0.0f);
"""


@cache
def _relu_and_mask() -> Any:
    return cupy.ElementwiseKernel(
        "raw T bias, int64 m, int64 rows", "uint8 aux, raw T y", _RELU_AND_MASK, "relu_and_mask"
    )


@cache
def _mask() -> Any:
    return cupy.ElementwiseKernel("raw uint8 aux, int64 m, int64 rows", "T dx", _MASK, "mask")


def relu_and_mask(y: Array, bias: Array, aux: Array) -> None:
    """y ``[batch, out]`` becomes relu(y + bias), and `aux` its relu_aux."""
    _relu_and_mask()(bias, y.shape[1], aux.shape[0], aux.T.reshape(-1), y.reshape(-1))


def mask(dx: Array, aux: Array) -> None:
    """dx ``[batch, in]`` becomes 0 where the relu_aux says so."""
    _mask()(aux.T.reshape(-1), dx.shape[1], aux.shape[0], dx.reshape(-1))
