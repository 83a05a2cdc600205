"""`matmuld demo`: a classifier of handwritten digits, trained through a service."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ..settings import Device
from .failure import Failure, try_folder, writing

if TYPE_CHECKING:
    from .training import History, Training

ENOUGH = 0.97
"""Of the test's digits; the network comes to 98 %."""
GRADIENT_TOLERANCE = 1e-5
"""Relative, for float32: some hundred roundoffs, as sums of hundreds of terms may need."""


class Demo(BaseModel):
    """Train a 64-512-512-10 ReLU network on scikit-learn's digits through a service."""

    device: Device = Field("auto", description="of the service that is started")
    output: Path = Field(Path("matmuld-demo.png"), description="image of loss, accuracy, latency")

    def run(self) -> int:
        try:
            from .figure import draw
            from .training import Training
        except ModuleNotFoundError as error:
            raise Failure(f"{error.name} is missing: pip install 'matmuld[demo]'") from error
        from .server import child

        try_folder(self.output.parent)
        console = Console()
        with child(self.device) as client:
            engine = client.info()["engine"]
            console.print(", ".join(f"{key} {value}" for key, value in engine.items()))
            training = Training(client)
            check(training.gradient_errors(), console)
            history = _train(training, console)
            pool = client.plans()["stats"]
        console.print(_summary(history, pool))
        with writing(self.output):
            draw(history, self.output)
        console.print(f"drawn: {self.output}")
        if history.accuracy[-1] < ENOUGH:
            raise Failure(f"test accuracy: expected {ENOUGH:.0%}, got {history.accuracy[-1]:.1%}")
        return 0


def check(errors: Mapping[str, float], console: Console) -> None:
    name, worst = max(errors.items(), key=lambda item: math.inf if item[1] != item[1] else item[1])
    found = f"the first step's gradients against float64: relative error {worst:.1e} ({name})"
    if not worst <= GRADIENT_TOLERANCE:
        raise Failure(f"{found}, {GRADIENT_TOLERANCE:.0e} is allowed")
    console.print(found)


def _train(training: Training, console: Console) -> History:
    columns = (
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=training.epochs, now="")
        for history in training.run():
            now = f"loss {history.loss[-1]:.4f}, test accuracy {history.accuracy[-1]:.1%}"
            progress.update(task, advance=1, now=now)
    return history


def _summary(history: History, pool: Mapping[str, Any]) -> Table:
    hits, misses = pool["hits"], pool["misses"]
    table = Table(show_header=False)
    table.add_row("test accuracy", f"{history.accuracy[-1]:.2%}")
    table.add_row("steps per second", f"{len(history.loss) / history.seconds:.0f}")
    for name, seconds in (("forward", history.forward), ("backward", history.backward)):
        median, tail = np.percentile(seconds, (50, 99)) * 1e3
        table.add_row(f"{name} request, p50 / p99", f"{median:.2f} / {tail:.2f} ms")
    table.add_row("plans, hits / misses", f"{hits} / {misses}")
    table.add_row("plan hit rate", f"{hits / (hits + misses):.2%}")
    return table
