"""`matmuld bench http`: small requests beside bare echoes and the product alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt
from rich.console import Console

from ...settings import Device
from ..failure import try_folder, writing
from .apart import measured
from .report import draw, render
from .results import CELLS, HttpResults, Measurement


class HttpBench(BaseModel):
    """Latency of a forward pass of one row through a resident layer, on one BLAS thread.

    Answers are checked; the exit status does not depend on the figures.
    """

    device: Device = Field("cpu", description="auto, cpu or cuda:N")
    rounds: PositiveInt = Field(12, description="every cell is measured once a round")
    seconds: PositiveFloat = Field(0.3, allow_inf_nan=False, description="for each cell of a round")
    output: Path = Field(Path("docs/benchmarks"), description="folder for a JSON file and a chart")

    def run(self) -> int:
        console = Console()
        with writing(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        try_folder(self.output)
        device, measurements = self._measure(Console(stderr=True))
        results = HttpResults.of(device, measurements, rounds=self.rounds, seconds=self.seconds)
        console.print(render(results))
        with writing(self.output):
            paths = self._write(results)
        for path in paths:
            console.print(f"wrote {path}")
        return 0

    def _measure(self, console: Console) -> tuple[dict[str, Any], list[Measurement]]:
        words = (self.device, str(self.rounds), str(self.seconds))
        total = 1 + self.rounds * len(CELLS)
        found = measured(f"{__package__}.measure", words, total, console)
        return found[0], [Measurement.model_validate(line) for line in found[1:]]

    def _write(self, results: HttpResults) -> list[Path]:
        """The JSON file and, where Matplotlib is installed, the chart."""
        name = f"http-{results.device['device'].replace(':', '')}"
        path = self.output / f"{name}.json"
        path.write_text(results.model_dump_json(indent=2) + "\n")
        if find_spec("matplotlib") is None:
            return [path]
        draw(results, path.with_suffix(".png"))
        return [path, path.with_suffix(".png")]
