"""Strategies as work to be measured, out of products of cuBLASLt and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import cupy
import numpy as np

from . import kernels
from .device import Array, Gpu
from .problems import Layer, Step, empty_mask
from .products import UNSUPPORTED, Product
from .work import Work, Works

Launch = Callable[[], Any]


class Builder:
    """Work out of tuned products of cuBLASLt, which `stack` frees.

    What cuBLASLt has no algorithm for is left out, and told in `notes`.
    """

    def __init__(self, gpu: Gpu, stack: ExitStack, notes: list[str]) -> None:
        self._gpu = gpu
        self._stack = stack
        self._notes = notes

    def add(self, works: Works, case: str, name: str, build: Callable[[], Work]) -> None:
        """The work that `build` makes, unless it cannot be had."""
        try:
            works[name] = build()
        except UNSUPPORTED as error:
            self._notes.append(f"{case}, {name}: not supported by cuBLASLt ({error})")

    def product(self, a: Array, b: Array, d: Array, epilog: str | None = None, **k: Any) -> Product:
        product = Product(self._gpu, a, b, d, epilog, **k)
        self._stack.callback(product.close)
        return product.tuned()


def forward_works(builder: Builder, case: str, layer: Layer, *, aux: bool) -> Works:
    """The strategies of a layer with bias and ReLU; with `aux` the mask, too."""
    batch, _, outputs = layer.shape
    works: Works = {}
    y = cupy.empty((batch, outputs), np.float16)
    mask = empty_mask(batch, outputs) if aux else None
    weight, xt, bias = layer.weight, layer.x.T, layer.bias

    def fused() -> Work:
        epilog = "RELU_AUX_BIAS" if aux else "RELU_BIAS"
        product = builder.product(weight, xt, y.T, epilog, vector=bias, aux=mask)
        return Work(product.run, lambda: [y])

    def split() -> Work:
        product = builder.product(layer.x, weight.T, y)
        scratch = empty_mask(batch, outputs) if mask is None else mask

        def run() -> None:
            product.run()
            kernels.relu_and_mask(y, bias, scratch)

        return Work(run, lambda: [y])

    builder.add(works, case, "fused", fused)
    builder.add(works, case, "split, one kernel", split)
    return works


class Gradients:
    """Products of a backward step: dx ``[batch, in]`` = dz·weight, masked, and dweight = gᵀ·x.

    g, whose sum is dbias, is dz, or dx where dweight is that of the layer below.
    """

    def __init__(
        self, builder: Builder, dz: Array, weight: Array, mask: Array, x: Array, *, below: bool
    ) -> None:
        self._builder = builder
        self._dz, self._weight, self._mask, self._x = dz, weight, mask, x
        self.dx = cupy.empty((dz.shape[0], weight.shape[1]), np.float16)
        self._g = self.dx if below else dz
        self.dbias = cupy.empty((self._g.shape[1],), np.float16)
        self.dweight = cupy.empty((self._g.shape[1], x.shape[1]), np.float16)

    def masked_dx(self, *, with_sums: bool = False) -> Launch:
        """DRELU, or DRELU_BGRAD."""
        epilog, sums = ("DRELU_BGRAD", self.dbias) if with_sums else ("DRELU", None)
        operands = self._weight.T, self._dz.T, self.dx.T
        return self._builder.product(*operands, epilog, vector=sums, aux=self._mask).run

    def split_dx(self) -> Launch:
        """A plain product, and one kernel that masks."""
        product = self._builder.product(self._dz, self._weight, self.dx)

        def run() -> None:
            product.run()
            kernels.mask(self.dx, self._mask)

        return run

    def plain_dweight(self) -> Launch:
        return self._builder.product(self._x.T, self._g, self.dweight.T).run

    def summing_dweight(self) -> Launch:
        """BGRADB."""
        operands = self._x.T, self._g, self.dweight.T
        return self._builder.product(*operands, "BGRADB", vector=self.dbias).run

    def split_dweight(self) -> Launch:
        """A plain product, and a sum."""
        product = self.plain_dweight()

        def run() -> None:
            product()
            self.dbias[...] = self._g.sum(axis=0, dtype=np.float32)

        return run


def _two(
    build_dx: Callable[[], Launch], build_dweight: Callable[[], Launch], outputs: Sequence[Array]
) -> Work:
    """One part after the other."""
    dx, dweight = build_dx(), build_dweight()

    def run() -> None:
        dx()
        dweight()

    return Work(run, lambda: outputs)


def layer_backward_works(builder: Builder, case: str, layer: Layer) -> Works:
    """The strategies of the backward pass of a layer: dx masked, dweight and dbias."""
    works: Works = {}
    g = Gradients(builder, layer.dz, layer.weight, layer.mask, layer.x, below=False)
    outputs = [g.dx, g.dweight, g.dbias]
    for name, dx, dweight in (
        ("fused: DRELU, BGRADB", g.masked_dx, g.summing_dweight),
        ("DRELU, dW and sum", g.masked_dx, g.split_dweight),
        ("dX and kernel, BGRADB", g.split_dx, g.summing_dweight),
        ("split: dX and kernel, dW and sum", g.split_dx, g.split_dweight),
    ):
        builder.add(works, case, name, partial(_two, dx, dweight, outputs))
    return works


def step_works(builder: Builder, case: str, step: Step, documented: str) -> Works:
    """The ways of measurements to do a whole backward step, the documented one first."""
    works: Works = {}
    g = Gradients(builder, step.dz, step.weight, step.mask, step.x, below=True)
    outputs = [g.dx, g.dbias, g.dweight]
    ways: tuple[tuple[str, Callable[[], Launch], Callable[[], Launch]], ...] = (
        (documented, partial(g.masked_dx, with_sums=True), g.plain_dweight),
        ("B: DRELU, dW with BGRADB", g.masked_dx, g.summing_dweight),
        ("C: dX and kernel, dW with BGRADB", g.split_dx, g.summing_dweight),
    )
    for name, dx, dweight in ways:
        builder.add(works, case, name, partial(_two, dx, dweight, outputs))
    return works


def executed_forward(builder: Builder, layer: Layer) -> Work:
    """RELU_AUX_BIAS by nvmath's own `execute`."""
    y = cupy.empty((layer.shape[0], layer.shape[2]), np.float16)
    mask = empty_mask(layer.shape[0], layer.shape[2])
    operands = layer.weight, layer.x.T, y.T
    product = builder.product(*operands, "RELU_AUX_BIAS", vector=layer.bias, aux=mask)
    return Work(product.execute, lambda: [y])


def executed_backward(builder: Builder, layer: Layer) -> Work:
    """DRELU and BGRADB by nvmath's own `execute`."""
    dx, dweight = cupy.empty_like(layer.x), cupy.empty_like(layer.weight)
    dbias = cupy.empty_like(layer.bias)
    operands = layer.weight.T, layer.dz.T, dx.T
    first = builder.product(*operands, "DRELU", aux=layer.mask)
    second = builder.product(layer.x.T, layer.dz, dweight.T, "BGRADB", vector=dbias)
    sums: list[Array] = []

    def run() -> None:
        first.execute()
        sums[:] = [second.execute()[1]["bgradb"]]

    return Work(run, lambda: [dx, dweight, *sums])
