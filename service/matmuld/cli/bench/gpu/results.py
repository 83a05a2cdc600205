"""The results of `matmuld bench gpu`, as they are kept."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel

from .... import __version__
from ..results import machine
from .bars import Bar, bars
from .section import Section

_PACKAGES = (
    *("cupy-cuda12x", "cupy-cuda13x", "nvmath-python", "nvidia-cublas-cu12", "nvidia-cublas"),
    *("cuda-bindings", "numpy", "torch", "triton", "uvicorn", "uvloop"),
)


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
            machine=machine(),
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
