"""`matmuld bench http`: what it keeps, and that no wrong answer passes. Figures are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld.cli import main
from matmuld.cli.bench.load import Layer, Subject
from matmuld.cli.bench.report import render
from matmuld.cli.bench.results import CELLS, Cell, HttpResults, Measurement, bars, summarized
from matmuld.cli.failure import Failure
from rich.console import Console

from .console import matmuld

ROUNDS = 2
PLACES = {("direct", "numpy")} | set(
    product(("tcp", "unix"), ("asgi", "fastapi", "product", "matmuld", "sdk"))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a short run put its files."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    words = ("--rounds", str(ROUNDS), "--seconds", "0.02", "--output", str(folder))
    assert main(["bench", "http", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "http-cpu.json").read_text())
    return document


def test_every_cell_is_in_the_summary_once(results: dict[str, Any]) -> None:
    cells = [(s["size"], (s["transport"], s["server"])) for s in results["summary"]]
    assert sorted(cells) == sorted(product((64, 1024), PLACES))


def test_percentiles_are_of_requests_that_were_made(results: dict[str, Any]) -> None:
    for s in results["summary"]:
        assert s["requests"] >= ROUNDS
        assert 0 < s["p50_us"] <= s["p90_us"] <= s["p99_us"] < 10e6
        least, greatest = s["p50_range_us"]
        assert least <= s["p50_us"] <= greatest
        assert 0 <= s["steal"] <= 1


def test_no_single_rounds_are_kept(results: dict[str, Any]) -> None:
    assert "measurements" not in results
    assert len(json.dumps(results)) < 10_000


def test_every_cell_is_measured_in_every_round() -> None:
    command = [sys.executable, "-m", "matmuld.cli.bench.measure", "cpu", "2", "0.001"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *lines = map(json.loads, said.splitlines())
    cells = [Measurement.model_validate(line).cell for line in lines]
    assert sorted(cells) == sorted([*CELLS, *CELLS])


def measured(cell: Cell, *us: float, steal: float = 0.0) -> Measurement:
    return Measurement.of(cell, [each * 1e-6 for each in us], steal)


def test_a_summary_is_the_median_over_the_rounds() -> None:
    rounds = [
        measured(cell, *us, steal=steal)
        for us, steal in (((5.0, 5.0), 0.1), ((9.0,), 0.2), ((7.0,), 0.6))
        for cell in CELLS
    ]
    summary = summarized(rounds)
    assert [summed.cell for summed in summary] == CELLS
    for summed in summary:
        assert (summed.mean_us, summed.p50_us, summed.p90_us, summed.p99_us) == (7, 7, 7, 7)
        assert summed.p50_range_us == (5, 9)
        assert (summed.requests, summed.steal) == (4, 0.3)


def test_the_bars_are_echoes_and_the_product_in_a_server_or_alone() -> None:
    us = {"numpy": 20.0, "asgi": 100.0, "fastapi": 1.0, "product": 150.0, "matmuld": 170.0}
    found = bars(summarized([measured(cell, us.get(cell.server, 1.0)) for cell in CELLS]))
    assert [(bar.transport, bar.size, bar.product, bar.limit_us, bar.holds) for bar in found] == [
        (transport, size, *rest)
        for size in (64, 1024)
        for transport in ("tcp", "unix")
        for rest in (("served", 180.0, True), ("alone", 150.0, False))
    ]


def test_bars_are_told_as_held_or_missed_by_how_much(results: dict[str, Any]) -> None:
    bar = {"transport": "unix", "size": 64, "p50_us": 170.0}
    served, alone = ({**bar, "product": product} for product in ("served", "alone"))
    told = [{**served, "limit_us": 180.0}, {**alone, "limit_us": 136.0}]
    console = Console(file=StringIO(), width=160)
    console.print(render(HttpResults.model_validate({**results, "bars": told})))
    assert isinstance(console.file, StringIO)
    said = console.file.getvalue()
    start = "64 over unix: p50 170.0, 1.3 · echo + "
    assert f"{start}(ASGI product - echo) is 180.0: held by 10.0 (6%)" in said
    assert f"{start}NumPy alone is 136.0: missed by 34.0 (25%)" in said


@pytest.mark.parametrize("folder", ["/proc", "/proc/x"])
def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_measured(
    folder: str,
) -> None:
    ended = matmuld("bench", "http", "--output", folder)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"matmuld: output: cannot write to {folder}: ")
    assert ended.stderr.count("\n") == 1


def test_a_run_says_where_and_with_what(results: dict[str, Any]) -> None:
    assert results["device"]["device"] == "cpu"
    assert {"cpu", "cores", "system"} <= set(results["machine"])
    assert {"matmuld", "python", "numpy", "uvicorn", "fastapi"} <= set(results["versions"])
    assert results["versions"]["numpy"] == np.__version__


def test_a_chart_is_drawn(folder: Path) -> None:
    assert (folder / "http-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_read_as_they_were_written(folder: Path) -> None:
    text = (folder / "http-cpu.json").read_text()
    assert HttpResults.model_validate_json(text).model_dump_json(indent=2) + "\n" == text


def test_one_wrong_element_ends_a_measurement() -> None:
    layer = Layer(64)
    right = Subject(lambda: layer.forward(layer.x), layer.check)
    assert right.measure(0.001)
    wrong = layer.forward(layer.x)
    wrong[0, -1] += 1
    with pytest.raises(Failure, match="wrong answer, off by up to 1"):
        replace(right, call=lambda: wrong).measure(0.001)


def test_percentiles_and_mean_of_known_times() -> None:
    seconds = [number * 1e-6 for number in range(1, 102)]
    found = Measurement.of(Cell("matmuld", "unix", 64), seconds, 0.5)
    assert (found.mean_us, found.p50_us) == (51, 51)
    assert (found.p90_us, found.p99_us) == (91, 100)
    assert (found.requests, found.steal) == (101, 0.5)
