"""A whole backward step, in the ways of the measurements and in matmuld's."""

from __future__ import annotations

from contextlib import ExitStack

import cupy
import numpy as np

from .....engine.signature import Options
from .....strategies import HiddenGradient
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
    """As the backward pass of a stack does it, as one step."""
    batch, inputs, hidden, _ = step.shape
    half = np.dtype(np.float16)
    return lab.matmuld.step(
        HiddenGradient(
            step.dz,
            step.weight,
            cupy.empty((batch, hidden), half),
            Options("COMPUTE_32F"),
            step.mask,
            "relu_aux",
            step.x,
            cupy.empty((hidden, inputs), half),
            cupy.empty(hidden, half),
        ),
        *("dx", "dbias", "dweight"),
    )
