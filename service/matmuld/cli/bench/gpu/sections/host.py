"""What the host takes to launch one planned product with bias and mask."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import cupy
import numpy as np

from .. import headers
from ..device import Array, check
from ..lab import Lab
from ..problems import Layer, empty_mask
from ..products import Product
from ..section import MATMULD, NVMATH, UNCHECKED, Section, named
from ..stopwatch import Budget, interleaved

SHAPES = ((64, 4096, 4096), (1, 4096, 4096), (8, 256, 256), (1024, 4096, 4096))
_CHECKED = "nvmath reset_operands() + execute()"
_BARE = "bare binding"
_EPILOG = "RELU_AUX_BIAS"


def measure(lab: Lab, section: Section, budget: Budget) -> None:
    for shape, part in zip(SHAPES, budget.parts([1] * len(SHAPES)), strict=True):
        with ExitStack() as stack:
            subjects = _subjects(lab, stack, Layer(shape))
            samples = interleaved(subjects, lab.rounds, part)
        section.add(named(shape), "host", samples)
        section.compare(named(shape), samples, MATMULD, UNCHECKED)
        lab.clear()


def _subjects(lab: Lab, stack: ExitStack, layer: Layer) -> dict[str, Callable[[], float]]:
    """Each of them, once its answer was found right."""
    (batch, _, outputs), expected = layer.shape, layer.forward()
    y, mask = cupy.empty((batch, outputs), np.float16), empty_mask(batch, outputs)
    operands = layer.weight, layer.x.T
    planned = Product(lab.gpu, *operands, epilog=_EPILOG, vector=layer.bias)
    stack.callback(planned.close)
    bare = Product(lab.gpu, *operands, y.T, _EPILOG, vector=layer.bias, aux=mask)
    stack.callback(bare.close)
    ways: dict[str, Callable[[], Any]] = {
        NVMATH: planned.execute,
        _CHECKED: planned.resetting(checked=True),
        UNCHECKED: planned.resetting(checked=False),
        _BARE: bare.run,
    }
    for name, run in ways.items():
        check(name, [_output(run(), y)], expected)
    hold = lab.matmuld.hold
    header = headers.forward(*map(hold, (layer.x, layer.weight, layer.bias)), aux=True)
    own = lab.matmuld.operation("linear/forward", header)
    own.run()
    check(MATMULD, [own.output("y")], expected)
    timed = {name: lambda run=run: lab.gpu.host_us(run) for name, run in ways.items()}
    return {**timed, MATMULD: own.host_us}


def _output(result: Any, y: Array) -> Array:
    """y of a product that returns D and its mask, or has written y itself."""
    return y if result is None else result[0].T
