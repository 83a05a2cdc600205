"""What `matmuld bench gpu` finds out, as it is kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from .... import __version__
from ..results import cpu_model
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

_PACKAGES = (
    *("cupy-cuda12x", "cupy-cuda13x", "nvmath-python", "nvidia-cublas-cu12", "nvidia-cublas"),
    *("cuda-bindings", "numpy", "torch", "triton", "uvicorn", "uvloop"),
)


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


class Bar(BaseModel):
    """A figure, and what it is to be at least or at most."""

    what: str
    case: str
    figure: float
    sign: Literal["≤", "≥"]
    limit: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.figure <= self.limit if self.sign == "≤" else self.figure >= self.limit


class GpuResults(BaseModel):
    """A whole run, or as much of it as there is."""

    benchmark: Literal["gpu"] = "gpu"
    date: str
    device: dict[str, Any]
    state: dict[str, str]
    """What nvidia-smi told at the start: clocks, power, temperature."""
    machine: dict[str, str | int]
    versions: dict[str, str]
    rounds: int
    budget_seconds: float
    sections: list[Section]
    bars: list[Bar]

    @classmethod
    def of(
        cls,
        device: dict[str, Any],
        state: dict[str, str],
        sections: list[Section],
        *,
        rounds: int,
        budget_seconds: float,
    ) -> GpuResults:
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device,
            state=state,
            machine={
                "cpu": cpu_model(),
                "cores": len(os.sched_getaffinity(0)),
                "system": platform.platform(),
            },
            versions={
                "matmuld": __version__,
                "python": platform.python_version(),
                **_installed(_PACKAGES),
            },
            rounds=rounds,
            budget_seconds=budget_seconds,
            sections=sections,
            bars=bars(sections),
        )


def _installed(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class _Rule(BaseModel):
    """A bar for the ratio of two subjects, in every case; `limits` are those of single cases."""

    what: str
    section: Name
    over: str
    under: str
    sign: Literal["≤", "≥"]
    limit: float
    limits: Mapping[str, float] = {}


LAUNCH_LIMIT_US = 15.0
_LAUNCH = "host time from operation to launched product"
_RULES = (
    _Rule(
        what=f"{_LAUNCH}, against {UNCHECKED}",
        section="host",
        over=MATMULD,
        under=UNCHECKED,
        sign="≤",
        limit=0.35,
    ),
    _Rule(
        what="backward step, DRELU_BGRAD + dW against matmuld",
        section="backward",
        over=DOCUMENTED,
        under=MATMULD,
        sign="≥",
        limit=1.15,
        limits={named((64, 4096, 4096, 4096)): 1.0},
    ),
    _Rule(
        what="the choice against the best",
        section="choices",
        over=MATMULD,
        under=BEST,
        sign="≤",
        limit=1.03,
    ),
    _Rule(
        what="the large shape, in process against in the service",
        section="large",
        over=IN_PROCESS,
        under=SERVICE,
        sign="≥",
        limit=0.99,
    ),
    _Rule(
        what="8 layers, nvmath execute() in process against one request",
        section="stacks",
        over=NVMATH,
        under=REQUEST,
        sign="≥",
        limit=1.5,
        limits={named((1024, 4096)): 1.0},
    ),
    _Rule(
        what="bfloat16 against float8",
        section="float8",
        over=BFLOAT16,
        under=FLOAT8,
        sign="≥",
        limit=1.75,
    ),
    _Rule(
        what="first request after a warm restart against steady",
        section="start",
        over=WARM,
        under=STEADY,
        sign="≤",
        limit=2.0,
    ),
)


def bars(sections: Sequence[Section]) -> list[Bar]:
    """Every bar whose figure was measured."""
    found = []
    for section in sections:
        if section.name == "host":
            found += _launches(section)
        for rule in _RULES:
            if rule.section == section.name:
                found += _ruled(rule, section)
    return found


def _launches(section: Section) -> list[Bar]:
    return [
        Bar(
            what=_LAUNCH,
            case=row.case,
            figure=row.p50_us,
            sign="≤",
            limit=LAUNCH_LIMIT_US,
            unit=" µs",
        )
        for row in section.rows
        if row.subject == MATMULD
    ]


def _ruled(rule: _Rule, section: Section) -> list[Bar]:
    return [
        Bar(
            what=rule.what,
            case=ratio.case,
            figure=ratio.value,
            sign=rule.sign,
            limit=rule.limits.get(ratio.case, rule.limit),
        )
        for ratio in section.ratios
        if (ratio.over, ratio.under) == (rule.over, rule.under)
    ]
