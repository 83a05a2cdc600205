"""`matmuld bench serve`: what it keeps, and how it counts. Figures are not judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld.cli import main
from matmuld.cli.bench.load import Layer, post_request
from matmuld.cli.bench.measure import forward_body
from matmuld.cli.bench.serve.clients import Work, poisson, work
from matmuld.cli.bench.serve.measure import shared, split
from matmuld.cli.bench.serve.results import (
    CLIENTS,
    LOADS,
    SIZE,
    Point,
    ServeResults,
    Setting,
    Times,
    capacity,
    summarized,
)
from matmuld.cli.failure import Failure
from matmuld_client import Client
from matmuld_client.wire import MSGPACK

from .console import matmuld

CLOSED = Setting("unix", "closed", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a short run put its files."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    words = ("--rounds", "1", "--seconds", "0.1", "--output", str(folder))
    assert main(["bench", "serve", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "serve-cpu.json").read_text())
    return document


def test_every_setting_is_measured(results: dict[str, Any]) -> None:
    found = [(p["transport"], p["loop"], p["clients"], p["load"]) for p in results["points"]]
    assert sorted(found, key=str) == sorted(
        [
            *product(("tcp", "unix"), ("closed",), CLIENTS, (None,)),
            *product(("tcp", "unix"), ("open",), (64,), LOADS),
        ],
        key=str,
    )


def test_percentiles_are_of_requests_that_were_made(results: dict[str, Any]) -> None:
    for p in results["points"]:
        assert p["requests"] > 0
        assert 0 < p["p50_us"] <= p["p90_us"] <= p["p99_us"] <= p["p999_us"] <= p["max_us"]
        assert (p["rate"] is None) == (p["late_us"] is None) == (p["loop"] == "closed")


def test_open_loops_ask_for_shares_of_what_closed_loops_managed(results: dict[str, Any]) -> None:
    points = ServeResults.model_validate(results).points
    for point in points:
        if point.load is not None:
            rate = point.load * capacity(points, point.transport)
            assert point.rate == pytest.approx(rate, abs=0.1)


def test_results_are_read_as_they_were_written_and_a_chart_is_drawn(folder: Path) -> None:
    text = (folder / "serve-cpu.json").read_text()
    assert ServeResults.model_validate_json(text).model_dump_json(indent=2) + "\n" == text
    assert (folder / "serve-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_measured() -> None:
    ended = matmuld("bench", "serve", "--output", "/proc/x")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("matmuld: output: cannot write to /proc/x: ")


def times(*requests: tuple[float, float, float]) -> Times:
    """Of requests that were to be sent, were, and were answered at these microseconds."""
    return Times(*np.array(requests).T * 1e-6)


def point(setting: Setting, *requests: tuple[float, float, float], rate: float | None) -> Point:
    return Point.of(setting, times(*requests), rate=rate, span=(0, 1e-3), steal=0.0)


def test_latency_counts_from_when_a_request_was_to_be_sent() -> None:
    found = point(Setting("tcp", "open", 64, 0.5), (100, 160, 200), (150, 160, 250), rate=2000)
    assert (found.p50_us, found.max_us) == (100, 100)
    assert found.late_us == pytest.approx(59.5)


def test_what_was_to_be_sent_outside_of_the_span_does_not_count() -> None:
    found = point(CLOSED, (-50, -50, 300), (300, 300, 700), (900, 900, 1100), rate=None)
    assert (found.requests, found.max_us) == (2, 400)
    assert found.throughput == 2000


def test_a_span_without_a_request_is_none() -> None:
    with pytest.raises(Failure, match=r"expected requests within 0\.001 seconds, there were none"):
        point(CLOSED, (-50, -50, 300), rate=None)


def test_a_summary_is_the_median_over_the_rounds_and_the_worst_of_all() -> None:
    rounds = [point(CLOSED, (0, 0, us), rate=None) for us in (100, 700, 200)]
    (summary,) = summarized(rounds)
    assert (summary.p50_us, summary.max_us, summary.requests) == (200, 700, 3)


def test_the_capacity_is_the_greatest_throughput_of_a_closed_loop() -> None:
    points = [
        point(CLOSED._replace(clients=clients), *[(0, 0, 5)] * answers, rate=None)
        for clients, answers in ((1, 2), (2, 4), (4, 3))
    ]
    points.append(point(Setting("unix", "open", 64, 0.9), *[(0, 0, 5)] * 9, rate=1))
    assert capacity(points, "unix") == 4000


def test_arrivals_are_poisson() -> None:
    arrivals = poisson(np.random.default_rng(0), 1000.0, 5.0, 25.0)
    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    assert (np.diff(arrivals) >= 0).all()
    assert arrivals[0] >= 5
    assert arrivals[-1] < 25
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1e-3, rel=0.03)
    assert gaps.std() == pytest.approx(1e-3, rel=0.05)


def test_clients_are_spread_evenly() -> None:
    assert shared(5, 3) == [2, 2, 1]
    assert shared(1, 3) == [1, 0, 0]


def test_clients_and_service_have_cores_of_their_own() -> None:
    assert split({0, 3}) == ({0}, {3})
    assert split({0, 1, 2, 5, 6}) == ({0, 1, 2}, {5, 6})
    assert split(set(range(32))) == (set(range(24)), set(range(24, 32)))
    assert split({4}) == ({4}, {4})


@pytest.fixture
def request_bytes(client: Client) -> Iterator[list[bytes]]:
    layer = Layer(SIZE)
    with client.put(layer.weight) as weight, client.put(layer.bias) as bias:
        body = forward_body(layer, weight.handle, bias.handle)
        yield post_request("/v1/linear/forward", MSGPACK, body)


def test_an_open_loop_sends_every_request_and_charges_it_for_its_wait(
    url: str, request_bytes: list[bytes]
) -> None:
    """One connection for ten requests that are due at once: the last waits for nine others."""
    found = work(Work(url, request_bytes, 1, 0.0, 0.0, np.zeros(10)))
    assert len(found.done) == 10
    assert (found.intended == 0).all()
    assert (found.sent[1:] >= found.done[:-1]).all()


def test_a_wrong_answer_ends_a_measurement(url: str, client: Client) -> None:
    layer = Layer(SIZE)
    with client.put(layer.weight * 2) as weight, client.put(layer.bias) as bias:
        body = forward_body(layer, weight.handle, bias.handle)
        request = post_request("/v1/linear/forward", MSGPACK, body)
        with pytest.raises(Failure, match="wrong answer"):
            work(Work(url, request, 1, 0.0, 0.0, np.zeros(1)))
