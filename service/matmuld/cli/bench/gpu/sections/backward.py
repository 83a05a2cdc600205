"""A whole backward step, in the ways of the measurements and in matmuld's."""

from __future__ import annotations

from contextlib import ExitStack

import cupy
import numpy as np

from .. import headers
from ..inprocess import in_turn
from ..lab import Lab
from ..problems import Step
from ..section import DOCUMENTED, MATMULD, Section, named
from ..stopwatch import Budget
from ..work import Work
from ..works import Builder, step_works

SHAPES = (
    (65536, 1024, 4096, 1024),
    (8192, 4096, 14336, 4096),
    (4096, 4096, 4096, 4096),
    (512, 1024, 4096, 1024),
    (64, 4096, 4096, 4096),
)


def measure(lab: Lab, section: Section, budget: Budget) -> None:
    for shape, part in zip(SHAPES, budget.parts([1] * len(SHAPES)), strict=True):
        case = named(shape)
        with ExitStack() as stack:
            step = Step(shape)
            works = step_works(Builder(lab.gpu, stack, section.notes), case, step, DOCUMENTED)
            works[MATMULD] = _own(lab, step)
            works = lab.right(section, case, works, step.backward())
            samples = lab.gpu_samples(works, part)
        section.add(case, "gpu", samples)
        section.compare(case, samples, DOCUMENTED, MATMULD)
        section.compare_with_best(case, samples, MATMULD)
        del step, works
        lab.clear()


def _own(lab: Lab, step: Step) -> Work:
    """dZ1 of one operation, the gradients of another, as the service would do them."""
    batch, _, hidden, _ = step.shape
    hold, operation = lab.matmuld.hold, lab.matmuld.operation
    x, weight, dz = map(hold, (step.x, step.weight, step.dz))
    mask = hold(step.mask, "relu_aux")
    dz1 = hold(cupy.empty((batch, hidden), np.float16))
    first = operation("linear/backward", headers.masked_input_gradient(dz, weight, mask, dz1))
    second = operation("linear/backward", headers.parameter_gradients(dz1, x))
    outputs = (first, "dx"), (second, "dbias"), (second, "dweight")
    return in_turn((first, second), outputs)
