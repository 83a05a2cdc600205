"""`matmuld bench serve`: what many clients of one service see."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt
from rich.console import Console

from ....settings import Device
from ...failure import try_folder, writing
from ..apart import measured
from .report import draw, render
from .results import POINTS, Point, ServeResults


class ServeBench(BaseModel):
    """Latency and throughput of the forward pass of one row, 1024 → 1024 with bias and ReLU, by a
    resident layer: closed loops of 1 to 64 clients, and Poisson arrivals at shares of what these
    achieve. BLAS has one thread.

    Answers are checked; the exit status does not depend on the figures.
    """

    device: Device = Field("cpu", description="auto, cpu or cuda:N")
    rounds: PositiveInt = Field(3, description="every point is measured once a round")
    seconds: PositiveFloat = Field(1.5, allow_inf_nan=False, description="for a point of a round")
    output: Path = Field(Path("docs/benchmarks"), description="folder for a JSON file and a chart")

    def run(self) -> int:
        with writing(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        try_folder(self.output)
        results = self._measure(Console(stderr=True))
        console = Console()
        console.print(render(results))
        with writing(self.output):
            paths = self._write(results)
        for path in paths:
            console.print(f"wrote {path}")
        return 0

    def _measure(self, console: Console) -> ServeResults:
        words = (self.device, str(self.rounds), str(self.seconds))
        total = 1 + self.rounds * POINTS
        told, *points = measured(f"{__package__}.measure", words, total, console)
        return ServeResults.of(
            told["device"],
            [Point.model_validate(point) for point in points],
            processes=told["processes"],
            seconds=self.seconds,
            rounds=self.rounds,
        )

    def _write(self, results: ServeResults) -> list[Path]:
        """The JSON file and, where Matplotlib is installed, the chart."""
        name = f"serve-{results.device['device'].replace(':', '')}"
        path = self.output / f"{name}.json"
        path.write_text(results.model_dump_json(indent=2) + "\n")
        if find_spec("matplotlib") is None:
            return [path]
        draw(results, path.with_suffix(".png"))
        return [path, path.with_suffix(".png")]
