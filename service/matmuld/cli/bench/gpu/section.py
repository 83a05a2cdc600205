"""What a section of `matmuld bench gpu` finds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel

from .stopwatch import Samples, fastest, paired_ratio

Clock = Literal["gpu", "host", "wall"]
Name = Literal["large", "backward", "host", "stacks", "float8", "start", "choices"]

TITLES: dict[Name, str] = {
    "large": "65536x16384 by 16384x8192, float16: forward with bias, ReLU and mask, and backward",
    "backward": "a whole backward step, dZ1, db1 and dW1, float16: batch, in, hidden, out",
    "host": "host time of one planned product with bias and mask, float16: batch, in, out",
    "stacks": "8 layers with bias and ReLU, float16: batch, width",
    "float8": "float8 against bfloat16, 8192 cubed, bias and ReLU, result in bfloat16",
    "start": "the first requests of a service: batch 64, 4096 by 4096, float16",
    "choices": "what matmuld chooses against all that it could, float16: batch, in, out",
}

MATMULD = "matmuld"
IN_PROCESS = "matmuld in process, back to back"
SERVICE = "matmuld service, back to back"
NVMATH = "nvmath execute()"
UNCHECKED = "nvmath reset_operands_unchecked() + execute()"
DOCUMENTED = "A: DRELU_BGRAD, dW"
BEST = "the best"
REQUEST = "one request"
BFLOAT16, FLOAT8 = "bfloat16", "float8_e4m3fn"
COLD, WARM, STEADY = "first request, cold", "first request, plans stored", "steady"


def named(shape: Sequence[int]) -> str:
    """A shape as cases are called by it."""
    return "x".join(map(str, shape))


class Row(BaseModel):
    """One subject of a case, over all rounds.

    `clock`: what the GPU took, what the host took until everything was launched, or what went by
    until the answer was there.
    """

    case: str
    subject: str
    clock: Clock
    p10_us: float
    p50_us: float
    p90_us: float
    rounds: int

    @classmethod
    def of(cls, case: str, subject: str, clock: Clock, us: Sequence[float]) -> Row:
        p10, p50, p90 = np.round(np.percentile(us, (10, 50, 90)), 2).tolist()
        return cls(
            case=case,
            subject=subject,
            clock=clock,
            p10_us=p10,
            p50_us=p50,
            p90_us=p90,
            rounds=len(us),
        )


class Ratio(BaseModel):
    """How many times as long `over` takes as `under`, which is `which` if that needs saying."""

    case: str
    over: str
    under: str
    value: float
    which: str | None = None

    def __str__(self) -> str:
        under = f"{self.under} ({self.which})" if self.which else self.under
        return f"{self.case}: {self.over} ÷ {under} = {self.value:.3f}"


class Section(BaseModel):
    """One part of a run; `notes` tell what is missing in it, and why."""

    name: Name
    rows: list[Row] = []
    ratios: list[Ratio] = []
    notes: list[str] = []
    seconds: float = 0.0

    def add(self, case: str, clock: Clock, samples: Samples) -> None:
        """All subjects of a case."""
        self.rows += [Row.of(case, subject, clock, us) for subject, us in samples.items()]

    def compare(self, case: str, samples: Samples, over: str, under: str) -> None:
        """Note the ratio of two subjects, if both are there."""
        if over in samples and under in samples:
            value = round(paired_ratio(samples[over], samples[under]), 4)
            self.ratios.append(Ratio(case=case, over=over, under=under, value=value))

    def compare_with_best(self, case: str, samples: Samples, over: str) -> None:
        """Note the ratio to the fastest of all others."""
        others = [name for name in samples if name != over]
        if over in samples and others:
            which = fastest(samples, others)
            value = round(paired_ratio(samples[over], samples[which]), 4)
            self.ratios.append(Ratio(case=case, over=over, under=BEST, value=value, which=which))
