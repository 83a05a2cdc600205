"""What a benchmark finds out, as it is kept."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel

from ... import __version__

Server = Literal["numpy", "asgi", "fastapi", "product", "matmuld", "sdk"]
Transport = Literal["direct", "tcp", "unix"]
Product = Literal["served", "alone"]

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


class Measurement(BaseModel):
    """Requests to one cell in one round, one after the other. `steal` is the share of the cores'
    time that the hypervisor took.
    """

    server: Server
    transport: Transport
    size: int
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    requests: int
    steal: float

    @property
    def cell(self) -> Cell:
        return Cell(self.server, self.transport, self.size)

    @classmethod
    def of(cls, cell: Cell, seconds: Sequence[float], steal: float) -> Measurement:
        us = np.array(seconds) * 1e6
        mean, p50, p90, p99 = np.round([us.mean(), *np.percentile(us, (50, 90, 99))], 1).tolist()
        return cls(
            **cell._asdict(),
            mean_us=mean,
            p50_us=p50,
            p90_us=p90,
            p99_us=p99,
            requests=len(seconds),
            steal=steal,
        )


class Summary(Measurement):
    """One cell over its rounds: medians of the latencies, all requests, the mean of `steal`."""

    p50_range_us: tuple[float, float]
    """The least and the greatest of a round."""

    @classmethod
    def of_rounds(cls, rounds: Sequence[Measurement]) -> Summary:
        p50 = [measured.p50_us for measured in rounds]
        return cls(
            **rounds[0].cell._asdict(),
            **{
                name: round(median(getattr(measured, name) for measured in rounds), 1)
                for name in ("mean_us", "p50_us", "p90_us", "p99_us")
            },
            requests=sum(measured.requests for measured in rounds),
            steal=round(mean(measured.steal for measured in rounds), 4),
            p50_range_us=(min(p50), max(p50)),
        )


class Bar(BaseModel):
    """Whether a hot route holds: p50 ≤ ECHO_FACTOR · p50 of the echo + what the product costs.

    That is either what it adds to an echo where a server makes it, or what NumPy takes for it alone
    in a hot loop.
    """

    transport: Transport
    size: int
    product: Product
    p50_us: float
    limit_us: float

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
    summary: list[Summary]
    bars: list[Bar]

    @classmethod
    def of(
        cls, device: dict[str, Any], measurements: list[Measurement], *, rounds: int, seconds: float
    ) -> HttpResults:
        summary = summarized(measurements)
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device,
            machine=machine(),
            versions=versions(),
            seconds=seconds,
            rounds=rounds,
            summary=summary,
            bars=bars(summary) if device["device"] == "cpu" else [],
        )


def summarized(measurements: Sequence[Measurement]) -> list[Summary]:
    """Every cell over its rounds."""
    rounds: dict[Cell, list[Measurement]] = {}
    for measurement in measurements:
        rounds.setdefault(measurement.cell, []).append(measurement)
    return [Summary.of_rounds(rounds[cell]) for cell in CELLS]


def bars(summary: Sequence[Summary]) -> list[Bar]:
    """Both bars of every transport and size. NumPy is in them, so they are for the CPU engine."""
    p50 = {cell.cell: cell.p50_us for cell in summary}
    result = []
    for size, transport in product(SIZES, TRANSPORTS):
        echo = p50[Cell("asgi", transport, size)]
        costs: dict[Product, float] = {
            "served": p50[Cell("product", transport, size)] - echo,
            "alone": p50[Cell("numpy", "direct", size)],
        }
        for kind, cost in costs.items():
            result.append(
                Bar(
                    transport=transport,
                    size=size,
                    product=kind,
                    p50_us=p50[Cell("matmuld", transport, size)],
                    limit_us=round(ECHO_FACTOR * echo + cost, 1),
                )
            )
    return result


def machine() -> dict[str, str | int]:
    """Where this runs."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """What a request goes through."""
    return {
        "matmuld": __version__,
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
