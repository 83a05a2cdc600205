"""`matmuld bench gpu`: side by side with nvmath and PyTorch, on one GPU."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PositiveFloat, PositiveInt
from pydantic_settings import NoDecode
from rich.console import Console

from ....engine import cuda_devices
from ...failure import Failure, try_folder, writing
from .report import draw, markdown, render
from .results import GpuResults
from .section import TITLES, Name, Section
from .state import gpu_state

SECTIONS: tuple[Name, ...] = get_args(Name)


def _device(value: str) -> str:
    if re.fullmatch(r"cuda:[0-9]+", value):
        return value
    raise ValueError(f"expected cuda:N, got {value!r}")


def _separated(value: object) -> object:
    """Names with commas between them."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return [name.strip() for part in parts for name in str(part).split(",")]


class GpuBench(BaseModel):
    """Medians of interleaved rounds: matmuld in process and as a service, nvmath, PyTorch.

    Answers are checked; the exit status does not depend on the figures.
    """

    device: Annotated[str, AfterValidator(_device)] = Field("cuda:0", description="cuda:N")
    only: Annotated[list[Name], NoDecode, BeforeValidator(_separated)] = Field(
        list(SECTIONS), min_length=1, description=f"sections, of {','.join(SECTIONS)}"
    )
    rounds: PositiveInt = Field(30, description="every subject is measured once a round, at most")
    budget_seconds: PositiveFloat = Field(
        420.0, allow_inf_nan=False, description="fewer rounds if they would take longer in all"
    )
    output: Path = Field(
        Path("docs/benchmarks"), description="folder for a JSON and a Markdown file and a chart"
    )

    def run(self) -> int:
        usable = cuda_devices()
        if int(self.device.removeprefix("cuda:")) >= usable:
            raise Failure(
                f"device: expected a CUDA device, {self.device} was asked for, "
                f"{usable} are usable (with CuPy, nvmath-python and a driver)"
            )
        with writing(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        try_folder(self.output)
        results = self._measure(Console(stderr=True))
        console = Console()
        console.print(render(results))
        for path in self._paths():
            console.print(f"wrote {path}")
        return 0

    def _measure(self, console: Console) -> GpuResults:
        """Section by section; the files are written after each, so that none is lost."""
        from .lab import Lab
        from .sections import run_sections

        state, sections = gpu_state(self.device), list[Section]()
        with Lab(self.device, self.rounds) as lab:
            device = lab.matmuld.describe()
            for section in run_sections(lab, self.sections(), self.budget_seconds):
                console.print(f"{section.seconds:6.1f} s  {TITLES[section.name]}")
                sections.append(section)
                results = self._results(device, state, sections)
                with writing(self.output):
                    self._write(results)
        return results

    def sections(self) -> list[Name]:
        """Those to be measured, in their own order, each once."""
        return [name for name in SECTIONS if name in self.only]

    def _results(
        self, device: dict[str, Any], state: dict[str, str], sections: list[Section]
    ) -> GpuResults:
        return GpuResults.of(
            device, state, sections, rounds=self.rounds, budget_seconds=self.budget_seconds
        )

    def _paths(self) -> list[Path]:
        """The JSON file, the Markdown file and, where Matplotlib is installed, the chart."""
        suffixes = [".json", ".md"]
        if find_spec("matplotlib") is not None:
            suffixes.append(".png")
        return [self.output / f"gpu{suffix}" for suffix in suffixes]

    def _write(self, results: GpuResults) -> None:
        json, document, *chart = self._paths()
        json.write_text(results.model_dump_json(indent=2) + "\n")
        document.write_text(markdown(results))
        for path in chart:
            draw(results, path)
