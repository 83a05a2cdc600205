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

Server = Literal["numpy", "asgi echo", "fastapi echo", "matmuld", "matmuld sdk"]
Transport = Literal["in process", "tcp", "unix"]

SIZES = (64, 1024)
TRANSPORTS: tuple[Transport, ...] = ("tcp", "unix")
PACKAGES = ("matmuld", "fastapi", "httptools", "msgpack", "numpy", "pydantic", "uvicorn", "uvloop")

ECHO_FACTOR = 1.3
"""A hot route takes at most so many times the bare ASGI echo, and the product."""


class Cell(NamedTuple):
    """What is measured: one float32 row through a resident layer of `size` inputs and outputs."""

    server: Server
    transport: Transport
    size: int


class Latency(BaseModel):
    """Of one sequential client's requests, in µs."""

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
    """Of one cell in one round. `steal` is the share of the cores that the hypervisor took meanwhile."""

    round: int
    requests: int
    steal: float

    @classmethod
    def of(cls, cell: Cell, round: int, seconds: Sequence[float], steal: float) -> Measurement:
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
        return cls(
            **cell._asdict(),
            round=round,
            requests=len(seconds),
            steal=round_to(steal, 4),
            mean_us=microseconds(sum(seconds) / len(seconds)),
            p50_us=microseconds(p50),
            p90_us=microseconds(p90),
            p99_us=microseconds(p99),
        )
