"""What is computed: operands on the GPU, and the answers by plain float32 products."""

from __future__ import annotations

from functools import cached_property

import cupy
import numpy as np

from ....engine.epilogs import aux_rows
from .device import Array, normal


def empty_mask(columns: int, rows: int) -> Array:
    """Memory for the relu_aux of a D of `rows` by `columns`."""
    return cupy.empty((columns, aux_rows("relu_aux", rows)), np.uint8).T


def packed(passes: Array) -> Array:
    """The relu_aux of booleans ``[batch, out]``."""
    batch, m = passes.shape
    rows = aux_rows("relu_aux", m)
    padded = cupy.zeros((batch, rows * 8), bool)
    padded[:, :m] = passes
    return cupy.packbits(padded.reshape(-1), bitorder="little").reshape(batch, rows).T


class Layer:
    """A layer at work. x stands for the pre-activations of the layer below, too: it is masked by
    the signs of x.

    Attributes:
        shape: (batch, in, out).
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        batch, inputs, outputs = self.shape = shape
        self.x = normal((batch, inputs), 1)
        self.weight = normal((outputs, inputs), 2, inputs**-0.5)
        self.bias = normal((outputs,), 3)
        self.dz = normal((batch, outputs), 4)

    @cached_property
    def mask(self) -> Array:
        return packed(self.x >= 0)

    def forward(self) -> list[Array]:
        """y, in float32."""
        y = _float(self.x) @ _float(self.weight).T
        y += self.bias
        return [cupy.maximum(y, 0, out=y)]

    def backward(self) -> list[Array]:
        """dx as the gradient by the pre-activations below, dweight and dbias, in float32."""
        dz = _float(self.dz)
        dx = dz @ _float(self.weight)
        dx *= self.x >= 0
        return [dx, dz.T @ _float(self.x), dz.sum(axis=0)]


class Step:
    """The backward step between two layers: dZ1 = (dZ2·W2) ⊙ relu'(z1), db1, dW1 = dZ1ᵀ·x.

    Attributes:
        shape: (batch, in, hidden, out).
    """

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        batch, inputs, hidden, outputs = self.shape = shape
        self.x = normal((batch, inputs), 1)
        self.weight = normal((outputs, hidden), 2, outputs**-0.5)
        self.dz = normal((batch, outputs), 3)
        passes = normal((batch, hidden), 4) >= 0
        self.mask = packed(passes)
        self._passes = passes

    def backward(self) -> list[Array]:
        """dZ1, db1 and dW1, in float32."""
        dz = _float(self.dz) @ _float(self.weight)
        dz *= self._passes
        return [dz, dz.sum(axis=0), dz.T @ _float(self.x)]


def _float(array: Array) -> Array:
    return array.astype(np.float32)


def chained(x: Array, weights: list[Array], biases: list[Array]) -> list[Array]:
    """y of a stack of layers, in float32, rounded to float16 between layers."""
    for weight, bias in zip(weights, biases, strict=True):
        y = _float(x) @ _float(weight).T
        y += bias
        x = cupy.maximum(y, 0, out=y).astype(np.float16)
    return [_float(x)]
