"""What matmuld chooses for a step, against every strategy and against PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from .. import headers
from ..device import Array
from ..lab import Lab
from ..problems import Layer
from ..section import MATMULD, Section, named
from ..stopwatch import Budget
from ..work import Work, Works
from ..works import Builder, forward_works, layer_backward_works

SHAPES = (
    (1, 1024, 1024),
    (1, 4096, 4096),
    (8, 4096, 4096),
    (16, 1024, 4096),
    (64, 4096, 4096),
    (128, 4096, 14336),
    (256, 1024, 1024),
    (512, 1024, 4096),
    (1024, 4096, 4096),
    (4096, 4096, 4096),
    (8192, 4096, 14336),
    (65536, 16384, 8192),
)
_SHARES = (*[1.0] * (len(SHAPES) - 1), 3.0)


def measure(lab: Lab, section: Section, budget: Budget) -> None:
    for shape, part in zip(SHAPES, budget.parts(_SHARES), strict=True):
        layer, (first, second) = Layer(shape), part.parts((1, 2))
        with ExitStack() as stack:
            case = f"{named(shape)} forward"
            works = _forward(lab, section, Builder(lab.gpu, stack, section.notes), case, layer)
            compare(lab, section, case, works, layer.forward(), first)
        with ExitStack() as stack:
            case = f"{named(shape)} backward"
            works = _backward(lab, section, Builder(lab.gpu, stack, section.notes), case, layer)
            compare(lab, section, case, works, layer.backward(), second)
        del layer, works
        lab.clear()


def _forward(lab: Lab, section: Section, builder: Builder, case: str, layer: Layer) -> Works:
    works = forward_works(builder, case, layer, aux=False)
    if pytorch := lab.with_pytorch(section):
        works |= pytorch.forward(layer, section.notes)
    hold = lab.matmuld.hold
    header = headers.forward(*map(hold, (layer.x, layer.weight, layer.bias)))
    header["outputs"] = {"y": "tensor"}
    works[MATMULD] = lab.matmuld.operation("linear/forward", header).work("y")
    return works


def _backward(lab: Lab, section: Section, builder: Builder, case: str, layer: Layer) -> Works:
    works = layer_backward_works(builder, case, layer)
    if pytorch := lab.with_pytorch(section):
        works |= pytorch.backward(layer, section.notes)
    hold, names = lab.matmuld.hold, ("dx", "dweight", "dbias")
    dz, weight, x = map(hold, (layer.dz, layer.weight, layer.x))
    header = headers.layer_backward(dz, weight, x, hold(layer.mask, "relu_aux"))
    header["outputs"] = dict.fromkeys(names, "tensor")
    works[MATMULD] = lab.matmuld.operation("linear/backward", header).work(*names)
    return works


def compare(
    lab: Lab,
    section: Section,
    case: str,
    works: Mapping[str, Work],
    expected: Sequence[Array],
    budget: Budget,
) -> None:
    """Measure all ways to do one step; the ratio is that of matmuld's to the fastest other."""
    right = lab.right(section, case, works, expected)
    samples = lab.gpu_samples(right, budget)
    section.add(case, "gpu", samples)
    section.compare_with_best(case, samples, MATMULD)
