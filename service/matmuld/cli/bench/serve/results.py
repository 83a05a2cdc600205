"""What `matmuld bench serve` finds out, as it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel

from ...failure import Failure
from ..load import Array
from ..results import Transport, machine, versions

Loop = Literal["closed", "open"]

SIZE = 1024
"""Inputs and outputs of the layer."""
TRANSPORTS: tuple[Transport, ...] = ("tcp", "unix")
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
CONNECTIONS = CLIENTS[-1]
"""Of an open loop."""
LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
"""Shares of the capacity, which is the greatest throughput of a closed loop."""
POINTS = len(TRANSPORTS) * (len(CLIENTS) + len(LOADS))


class Setting(NamedTuple):
    """What is measured: over what, by how many clients that wait for their answers (closed), or at
    what share of the capacity, whether or not answers come (open).
    """

    transport: Transport
    loop: Loop
    clients: int
    load: float | None = None


class Point(BaseModel):
    """Requests of one setting in one round.

    Latencies of an open loop count from when a request was to be sent, not from when it was: who
    waits for a slow answer before it asks again leaves out what the others would have seen.

    Attributes:
        rate: requests that were to be sent a second; of an open loop.
        throughput: answers a second.
        late_us: how late requests were sent, p99; of an open loop. It is part of their latencies.
        steal: the share of the cores' time that the hypervisor took.
    """

    transport: Transport
    loop: Loop
    clients: int
    load: float | None
    rate: float | None
    throughput: float
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float
    late_us: float | None
    requests: int
    steal: float

    @property
    def setting(self) -> Setting:
        return Setting(self.transport, self.loop, self.clients, self.load)

    @classmethod
    def of(
        cls,
        setting: Setting,
        times: Times,
        *,
        rate: float | None,
        span: tuple[float, float],
        steal: float,
    ) -> Point:
        """`span`: from when to when a request counts, by when it was to be sent.

        Raises:
            Failure: that is too short for a single one.
        """
        start, end = span
        counted = (times.intended >= start) & (times.intended < end)
        if not counted.any():
            raise Failure(f"expected requests within {end - start:g} seconds, there were none")
        us = (times.done - times.intended)[counted] * 1e6
        late = (times.sent - times.intended)[counted] * 1e6
        answers = np.count_nonzero((times.done >= start) & (times.done < end))
        p50, p90, p99, p999, most = np.round(np.percentile(us, (50, 90, 99, 99.9, 100)), 1).tolist()
        return cls(
            **setting._asdict(),
            rate=None if rate is None else round(rate, 1),
            throughput=round(float(answers) / (end - start), 1),
            p50_us=p50,
            p90_us=p90,
            p99_us=p99,
            p999_us=p999,
            max_us=most,
            late_us=None if rate is None else round(float(np.percentile(late, 99)), 1),
            requests=len(us),
            steal=steal,
        )


class Times(NamedTuple):
    """Of every request, in seconds of one clock: when it was to be sent, was, and was answered."""

    intended: Array
    sent: Array
    done: Array

    @classmethod
    def joined(cls, parts: Sequence[Times]) -> Times:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


def summarized(points: Iterable[Point]) -> list[Point]:
    """Every setting over its rounds: medians, all requests, and the worst of `max_us`."""
    rounds: dict[Setting, list[Point]] = {}
    for point in points:
        rounds.setdefault(point.setting, []).append(point)
    return [_over_rounds(setting, found) for setting, found in rounds.items()]


def _over_rounds(setting: Setting, rounds: Sequence[Point]) -> Point:
    names = ("throughput", "p50_us", "p90_us", "p99_us", "p999_us", "steal")
    medians = {name: median(getattr(point, name) for point in rounds) for name in names}
    rates = [point.rate for point in rounds if point.rate is not None]
    late = [point.late_us for point in rounds if point.late_us is not None]
    return Point(
        **setting._asdict(),
        **{name: round(value, 4) for name, value in medians.items()},
        rate=median(rates) if rates else None,
        late_us=median(late) if late else None,
        max_us=max(point.max_us for point in rounds),
        requests=sum(point.requests for point in rounds),
    )


def capacity(points: Iterable[Point], transport: Transport) -> float:
    """The greatest throughput of a closed loop, answers a second."""
    return max(
        point.throughput
        for point in summarized(points)
        if (point.transport, point.loop) == (transport, "closed")
    )


class ServeResults(BaseModel):
    """A whole run."""

    benchmark: Literal["serve"] = "serve"
    date: str
    device: dict[str, Any]
    machine: dict[str, str | int]
    versions: dict[str, str]
    size: int = SIZE
    processes: int
    seconds: float
    rounds: int
    points: list[Point]

    @classmethod
    def of(
        cls,
        device: dict[str, Any],
        points: Sequence[Point],
        *,
        processes: int,
        seconds: float,
        rounds: int,
    ) -> ServeResults:
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device,
            machine=machine(),
            versions=versions(),
            processes=processes,
            seconds=seconds,
            rounds=rounds,
            points=summarized(points),
        )
