"""Rounds, and the time that they may take; nothing here knows of a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from statistics import median
from time import monotonic
from typing import NamedTuple

LEAST_ROUNDS = 2

Samples = dict[str, list[float]]
"""Microseconds of every subject, one for each round."""


class Budget(NamedTuple):
    """A stretch of time, by the monotonic clock."""

    start: float
    end: float

    @classmethod
    def of(cls, seconds: float) -> Budget:
        now = monotonic()
        return cls(now, now + seconds)

    def parts(self, shares: Sequence[float]) -> list[Budget]:
        """Stretches that follow each other, as long as the shares say.

        They begin and end at fixed times: what one does not use is left to the next.
        """
        result, at = [], self.start
        for share in shares:
            end = at + (self.end - self.start) * share / sum(shares)
            result.append(Budget(at, end))
            at = end
        return result

    @property
    def is_over(self) -> bool:
        return monotonic() > self.end


def interleaved(
    subjects: Mapping[str, Callable[[], float]], rounds: int, budget: Budget
) -> Samples:
    """One sample of every subject in every round, in another order each time.

    There are `rounds` of them, or fewer if the time is over, but at least `LEAST_ROUNDS`.
    """
    random, order = Random(0), list(subjects)
    samples: Samples = {name: [] for name in subjects}
    with _no_collection():
        for number in range(rounds):
            if number >= LEAST_ROUNDS and budget.is_over:
                break
            random.shuffle(order)
            for name in order:
                samples[name].append(subjects[name]())
    return samples


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection of garbage takes longer than a product."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios, round by round: a clock that drifts touches both alike."""
    return median(a / b for a, b in zip(over, under, strict=True))


def fastest(samples: Samples, names: Sequence[str]) -> str:
    """Whose median is the least."""
    return min(names, key=lambda name: median(samples[name]))
