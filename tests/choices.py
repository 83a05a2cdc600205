"""Records for the plan store, and what it makes of them on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matmuld.entries import Kind
from matmuld.store import PlanStore

DEVICE = {"gpu": "NVIDIA H200", "multiprocessors": 132, "cublaslt": 130100, "matmuld": "0.1.0"}
ALGORITHM = {"algorithm": bytes(range(64)), "workspace_bytes": 1 << 20, "median_us": 12.5}
STRATEGY = {
    "way": "fused",
    "median_us": 40.0,
    "candidates": {"fused": 40.0, "split": 55.5},
    "measured_at": 1_700_000_000.0,
}
RECORDS: dict[Kind, dict[str, Any]] = {"algorithm": ALGORITHM, "strategy": STRATEGY}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.plan"))


def kept(folder: Path) -> Path:
    """The file of the one choice that is there."""
    PlanStore(folder, DEVICE).put("strategy", "key", STRATEGY)
    (path,) = files(folder)
    return path
