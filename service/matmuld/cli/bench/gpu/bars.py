"""What must hold, by the figures of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from .section import (
    BEST,
    BFLOAT16,
    DOCUMENTED,
    FLOAT8,
    IN_PROCESS,
    MATMULD,
    NVMATH,
    REQUEST,
    SERVICE,
    STEADY,
    UNCHECKED,
    WARM,
    Name,
    Section,
    named,
)


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
