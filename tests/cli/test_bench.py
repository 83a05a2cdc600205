"""`matmuld bench http`: what it keeps, and that no wrong answer passes. Figures are not judged."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld.cli import main
from matmuld.cli.bench.load import Layer, Subject
from matmuld.cli.bench.results import Cell, HttpResults, Measurement
from matmuld.cli.failure import Failure

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


def test_every_cell_is_measured_in_every_round(results: dict[str, Any]) -> None:
    cells = [
        (m["round"], m["size"], (m["transport"], m["server"])) for m in results["measurements"]
    ]
    assert sorted(cells) == sorted(product(range(ROUNDS), (64, 1024), PLACES))


def test_percentiles_are_of_requests_that_were_made(results: dict[str, Any]) -> None:
    for m in results["measurements"]:
        assert m["requests"] > 0
        assert 0 < m["p50_us"] <= m["p90_us"] <= m["p99_us"] < 10e6
        assert 0 <= m["steal"] <= 1


def test_the_summary_is_the_median_over_the_rounds(results: dict[str, Any]) -> None:
    def key(m: dict[str, Any]) -> tuple[Any, ...]:
        return m["server"], m["transport"], m["size"]

    for latency in results["summary"]:
        rounds = [m["p50_us"] for m in results["measurements"] if key(m) == key(latency)]
        assert latency["p50_us"] == pytest.approx(np.median(rounds), abs=0.06)


def test_the_bar_is_the_echo_by_a_factor_and_numpy(results: dict[str, Any]) -> None:
    p50 = {(s["server"], s["transport"], s["size"]): s["p50_us"] for s in results["summary"]}
    assert len(results["bars"]) == 4
    for bar in results["bars"]:
        echo = p50["asgi", bar["transport"], bar["size"]]
        numpy = p50["numpy", "direct", bar["size"]]
        assert bar["limit_us"] == pytest.approx(1.3 * echo + numpy, abs=0.06)
        assert bar["p50_us"] == p50["matmuld", bar["transport"], bar["size"]]


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
    measured = Measurement.of(Cell("matmuld", "unix", 64), 0, seconds, 0.5)
    assert (measured.mean_us, measured.p50_us) == (51, 51)
    assert (measured.p90_us, measured.p99_us) == (91, 100)
    assert (measured.requests, measured.steal) == (101, 0.5)
