"""The sections of `matmuld bench gpu`, one module each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

from ..lab import Lab
from ..section import Name, Section
from ..stopwatch import Budget
from . import backward, choices, float8, host, large, stacks, start


class _Part(NamedTuple):
    """A section's measurement, and its share of the time."""

    measure: Callable[[Lab, Section, Budget], None]
    share: float


_PARTS: dict[Name, _Part] = {
    "large": _Part(large.measure, 0.2),
    "backward": _Part(backward.measure, 0.1),
    "host": _Part(host.measure, 0.03),
    "stacks": _Part(stacks.measure, 0.08),
    "float8": _Part(float8.measure, 0.05),
    "start": _Part(start.measure, 0.14),
    "choices": _Part(choices.measure, 0.4),
}


def run_sections(lab: Lab, names: Sequence[Name], seconds: float) -> Iterator[Section]:
    """The sections of those names, each when it is done."""
    budgets = Budget.of(seconds).parts([_PARTS[name].share for name in names])
    for name, budget in zip(names, budgets, strict=True):
        section, began = Section(name=name), monotonic()
        _PARTS[name].measure(lab, section, budget)
        lab.clear()
        section.seconds = round(monotonic() - began, 1)
        yield section
