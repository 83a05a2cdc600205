"""What a benchmark finds out, as it is kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel

from ... import __version__

Server = Literal["numpy", "asgi", "fastapi", "product", "matmuld", "sdk"]
Transport = Literal["direct", "tcp", "unix"]

SIZES = (64, 1024)
SERVERS: tuple[Server, ...] = ("asgi", "fastapi", "product", "matmuld", "sdk")
TRANSPORTS: tuple[Transport, ...] = ("tcp", "unix")

ECHO_FACTOR = 1.3
"""A hot route is to take no longer than so many ASGI echoes and the product itself."""

_PACKAGES = ("fastapi", "httptools", "numpy", "pydantic", "uvicorn", "uvloop")


class Cell(NamedTuple):
    """What is measured: who answers, over what, and the inputs and outputs of the layer."""

    server: Server
    transport: Transport
    size: int


CELLS = [
    cell
    for size in SIZES
    for cell in (
        Cell("numpy", "direct", size),
        *(Cell(server, transport, size) for transport in TRANSPORTS for server in SERVERS),
    )
]


class Latency(BaseModel):
    """Of requests one after the other, in µs: a round's, or the median over the rounds."""

    server: Server
    transport: Transport
    size: int
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float

    @property
    def cell(self) -> Cell:
        return Cell(self.server, self.transport, self.size)


class Measurement(Latency):
    """One cell in one round. `steal` is the share of the cores' time that the hypervisor took."""

    round: int
    requests: int
    steal: float

    @classmethod
    def of(cls, cell: Cell, round: int, seconds: Sequence[float], steal: float) -> Measurement:
        us = np.array(seconds) * 1e6
        mean, p50, p90, p99 = np.round([us.mean(), *np.percentile(us, (50, 90, 99))], 1).tolist()
        return cls(
            **cell._asdict(),
            mean_us=mean,
            p50_us=p50,
            p90_us=p90,
            p99_us=p99,
            round=round,
            requests=len(seconds),
            steal=steal,
        )


class Bar(BaseModel):
    """Whether a hot route holds: p50 ≤ ECHO_FACTOR · p50 of the echo + p50 of NumPy.

    `echoes` is what it takes beside NumPy's time, in echoes.
    """

    transport: Transport
    size: int
    p50_us: float
    limit_us: float
    echoes: float

    @property
    def holds(self) -> bool:
        return self.p50_us <= self.limit_us


class HttpResults(BaseModel):
    """A whole run."""

    benchmark: Literal["http"] = "http"
    date: str
    device: dict[str, Any]
    machine: dict[str, str | int]
    versions: dict[str, str]
    seconds: float
    rounds: int
    summary: list[Latency]
    bars: list[Bar]
    measurements: list[Measurement]

    @classmethod
    def of(
        cls, device: dict[str, Any], measurements: list[Measurement], *, rounds: int, seconds: float
    ) -> HttpResults:
        summary = medians(measurements)
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device,
            machine={
                "cpu": cpu_model(),
                "cores": len(os.sched_getaffinity(0)),
                "system": platform.platform(),
            },
            versions={
                "matmuld": __version__,
                "python": platform.python_version(),
                **{package: version(package) for package in _PACKAGES},
            },
            seconds=seconds,
            rounds=rounds,
            summary=summary,
            bars=bars(summary) if device["device"] == "cpu" else [],
            measurements=measurements,
        )


def medians(measurements: Sequence[Measurement]) -> list[Latency]:
    """Each cell's figures, the median over its rounds."""
    rounds: dict[Cell, list[Measurement]] = {}
    for measurement in measurements:
        rounds.setdefault(measurement.cell, []).append(measurement)
    return [
        Latency(
            **cell._asdict(),
            **{
                name: round(median(getattr(measurement, name) for measurement in rounds[cell]), 1)
                for name in ("mean_us", "p50_us", "p90_us", "p99_us")
            },
        )
        for cell in CELLS
    ]


def bars(summary: Sequence[Latency]) -> list[Bar]:
    """The bar of every transport and size. NumPy is in it, so it is one for the CPU engine."""
    p50 = {latency.cell: latency.p50_us for latency in summary}
    result = []
    for size in SIZES:
        product = p50[Cell("numpy", "direct", size)]
        for transport in TRANSPORTS:
            echo, route = (p50[Cell(server, transport, size)] for server in ("asgi", "matmuld"))
            result.append(
                Bar(
                    transport=transport,
                    size=size,
                    p50_us=route,
                    limit_us=round(ECHO_FACTOR * echo + product, 1),
                    echoes=round((route - product) / echo, 2),
                )
            )
    return result


def cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
