"""`matmuld bench gpu`: what it keeps and tells, and those of its parts that need no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from matmuld.cli.bench import gpu
from matmuld.cli.bench.gpu import SECTIONS, GpuBench, headers
from matmuld.cli.bench.gpu import section as kept
from matmuld.cli.bench.gpu.bars import Bar, bars
from matmuld.cli.bench.gpu.inprocess import Matmuld
from matmuld.cli.bench.gpu.report import draw, duration, markdown, render
from matmuld.cli.bench.gpu.results import GpuResults
from matmuld.cli.bench.gpu.section import Row, Section
from matmuld.cli.bench.gpu.served import Service, back_to_back, request, serving
from matmuld.cli.bench.gpu.stopwatch import (
    LEAST_ROUNDS,
    Budget,
    fastest,
    interleaved,
    paired_ratio,
)
from matmuld.engine.signature import Options
from matmuld.strategies import HiddenGradient
from matmuld_client.wire import unpack
from rich.console import Console

from ..reference import Host, f64, pack_mask
from .console import matmuld

FOREVER = Budget(0.0, float("inf"))
OVER = Budget(0.0, 0.0)
DEVICE = {"device": "cuda:0", "gpu": "NVIDIA H200", "cublaslt": 130100}


def canned() -> list[Section]:
    """One section of each kind of bar, and one that could not be measured."""
    host, backward = Section(name="host", seconds=1.5), Section(name="backward")
    samples = {kept.MATMULD: [10.0, 12.0], kept.UNCHECKED: [50.0, 48.0]}
    host.add("64x4096x4096", "host", samples)
    host.compare("64x4096x4096", samples, kept.MATMULD, kept.UNCHECKED)
    for case in ("4096x4096x4096x4096", "64x4096x4096x4096"):
        samples = {kept.DOCUMENTED: [2200.0], "B": [2100.0], kept.MATMULD: [2000.0]}
        backward.add(case, "gpu", samples)
        backward.compare(case, samples, kept.DOCUMENTED, kept.MATMULD)
        backward.compare_with_best(case, samples, kept.MATMULD)
    missing = Section(name="float8", notes=["not available: [no such type]"])
    return [host, backward, missing]


@pytest.fixture
def results() -> GpuResults:
    state = {"SM clock": "1980 MHz", "power": "312 W"}
    return GpuResults.of(DEVICE, state, canned(), rounds=30, budget_seconds=420.0)


def said(results: GpuResults) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(render(results))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# The stopwatch


def test_every_subject_has_one_sample_a_round_in_changing_order() -> None:
    called: list[str] = []

    def subject(name: str) -> Callable[[], float]:
        def sample() -> float:
            called.append(name)
            return float(len(called))

        return sample

    names = ["a", "b", "c"]
    samples = interleaved({name: subject(name) for name in names}, 20, FOREVER)
    assert {name: len(us) for name, us in samples.items()} == dict.fromkeys(names, 20)
    rounds = [tuple(called[start : start + 3]) for start in range(0, 60, 3)]
    assert {tuple(sorted(names)) for names in rounds} == {("a", "b", "c")}
    assert len(set(rounds)) > 2


def test_a_budget_that_is_over_leaves_the_least_rounds() -> None:
    assert len(interleaved({"a": lambda: 1.0}, 50, OVER)["a"]) == LEAST_ROUNDS
    assert len(interleaved({"a": lambda: 1.0}, 1, OVER)["a"]) == 1


def test_the_parts_of_a_budget_follow_each_other() -> None:
    parts = Budget(10.0, 20.0).parts((1, 3, 1))
    assert parts == [Budget(10.0, 12.0), Budget(12.0, 18.0), Budget(18.0, 20.0)]
    whole = Budget.of(60.0)
    assert not whole.is_over
    assert 59 < whole.end - monotonic() <= 60


def test_a_drifting_clock_does_not_touch_a_paired_ratio() -> None:
    under = [1.0, 2.0, 4.0, 8.0]
    assert paired_ratio([2 * us for us in under], under) == 2.0


def test_the_fastest_has_the_least_median() -> None:
    samples = {"a": [1.0, 9.0, 9.0], "b": [5.0, 5.0, 5.0], "c": [4.0, 6.0, 6.0]}
    assert fastest(samples, ["a", "b", "c"]) == "b"


# Results


def test_percentiles_of_known_times() -> None:
    row = Row.of("case", "subject", "gpu", list(range(101)))
    assert (row.p10_us, row.p50_us, row.p90_us, row.rounds) == (10, 50, 90, 101)


def test_a_ratio_needs_both_subjects() -> None:
    section = Section(name="large")
    section.compare("forward", {"a": [1.0]}, "a", "b")
    section.compare_with_best("forward", {"a": [1.0]}, "a")
    assert section.ratios == []


def test_the_best_is_of_the_others_and_named() -> None:
    (ratio,) = canned()[1].ratios[1:2]
    assert (ratio.over, ratio.under, ratio.which) == (kept.MATMULD, kept.BEST, "B")
    assert ratio.value == round(2000 / 2100, 4)


def test_bars_are_those_of_what_was_measured() -> None:
    found = [(bar.case, bar.figure, bar.sign, bar.limit, bar.holds) for bar in bars(canned())]
    assert found == [
        ("64x4096x4096", 11.0, "≤", 15.0, True),
        ("64x4096x4096", 0.225, "≤", 0.35, True),
        ("4096x4096x4096x4096", 1.1, "≥", 1.15, False),
        ("64x4096x4096x4096", 1.1, "≥", 1.0, True),
    ]


@pytest.mark.parametrize(
    ("name", "over", "under", "value", "holds"),
    [
        ("choices", kept.MATMULD, kept.BEST, 1.03, True),
        ("choices", kept.MATMULD, kept.BEST, 1.031, False),
        ("large", kept.IN_PROCESS, kept.SERVICE, 0.989, False),
        ("stacks", kept.NVMATH, kept.REQUEST, 1.5, True),
        ("float8", kept.BFLOAT16, kept.FLOAT8, 1.74, False),
        ("start", kept.WARM, kept.STEADY, 2.0, True),
    ],
)
def test_every_bar_has_its_limit(
    name: Any, over: str, under: str, value: float, holds: bool
) -> None:
    section = Section(name=name)
    section.ratios.append(kept.Ratio(case="x", over=over, under=under, value=value))
    assert [bar.holds for bar in bars([section])] == [holds]


def test_the_last_stack_need_only_be_as_fast() -> None:
    section = Section(name="stacks")
    for case in ("16x1024", "1024x4096"):
        section.compare(case, {kept.NVMATH: [1.2], kept.REQUEST: [1.0]}, kept.NVMATH, kept.REQUEST)
    assert [bar.holds for bar in bars([section])] == [False, True]


def test_results_are_read_as_they_were_written(results: GpuResults) -> None:
    text = results.model_dump_json(indent=2)
    assert GpuResults.model_validate_json(text) == results
    assert {"matmuld", "python", "numpy"} <= set(results.versions)
    assert results.date.endswith("+00:00")


# Reports


def test_durations_are_in_the_unit_that_reads_best() -> None:
    assert (duration(11.254), duration(999.9), duration(26_100.0)) == (
        "11.25 µs",
        "999.90 µs",
        "26.100 ms",
    )


def test_the_table_tells_figures_bars_and_what_is_missing(results: GpuResults) -> None:
    text = said(results)
    assert "11.00 µs" in text
    assert "2.200 ms" in text
    assert "64x4096x4096: matmuld ÷ nvmath reset_operands_unchecked() + execute() = 0.225" in text
    assert "not available: [no such type]" in text
    assert [line.split()[-1] for line in text.splitlines() if "≥" in line] == ["missed", "held"]


def test_the_document_has_the_same_as_tables(results: GpuResults) -> None:
    lines = markdown(results).splitlines()
    assert lines[2].startswith("- NVIDIA H200, ")
    assert "- SM clock 1980 MHz, power 312 W" in lines
    assert any(line.endswith("| 1.100 | ≥ 1.15 | missed |") for line in lines)
    assert "- not available: [no such type]" in lines
    grids = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in grids} <= {6, 7}


def test_a_run_without_any_figure_is_still_told(tmp_path: Path) -> None:
    empty = Section(name="float8", notes=["not available: no float8"])
    results = GpuResults.of(DEVICE, {}, [empty], rounds=1, budget_seconds=1.0)
    assert "not available: no float8" in said(results)
    assert "What must hold" not in markdown(results)
    draw(results, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_is_drawn(results: GpuResults, tmp_path: Path) -> None:
    draw(results, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


# The command


def test_sections_are_measured_in_their_own_order_and_once() -> None:
    assert GpuBench.model_validate({}).sections() == list(SECTIONS)
    chosen = GpuBench.model_validate({"only": "host, large,host"})
    assert chosen.sections() == ["large", "host"]


@pytest.mark.parametrize("words", [("--only", "host,large"), ("--only", "host", "--rounds", "2")])
def test_without_a_gpu_it_says_so(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = matmuld("bench", "gpu", *words, "--output", str(tmp_path / "new"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "matmuld: device: expected a CUDA device, cuda:0 was asked for, "
        "0 are usable (with CuPy, nvmath-python and a driver)\n"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--only", "host,nothing"), "gpu.only.1: input should be 'large', "),
        (("--device", "cpu"), "gpu.device: expected cuda:N, got 'cpu'"),
        (("--rounds", "0"), "gpu.rounds: input should be greater than 0, got '0'"),
        (("--budget-seconds", "inf"), "gpu.budget_seconds: input should be a finite number"),
    ],
)
def test_what_is_asked_wrongly_is_named(words: tuple[str, ...], reason: str) -> None:
    ended = matmuld("bench", "gpu", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"matmuld: {reason}")


def test_every_section_has_a_title() -> None:
    assert tuple(kept.TITLES) == gpu.SECTIONS


# Subjects, on the CPU engine


def random(*shape: int) -> Host:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def own() -> Iterator[Matmuld]:
    matmuld = Matmuld("cpu")
    yield matmuld
    matmuld.close()


def test_an_operation_in_process_is_launched_again_and_again(own: Matmuld) -> None:
    x, weight, bias = random(5, 8), random(6, 8), random(6)
    header = headers.forward(*map(own.hold, (x, weight, bias)), aux=True)
    operation = own.operation("linear/forward", header)
    expected = np.maximum(f64(x) @ f64(weight).T + f64(bias), 0)
    for _ in range(2):
        operation.run()
        np.testing.assert_allclose(operation.output("y"), expected, rtol=1e-5, atol=1e-5)
    assert operation.output("aux").shape == (16, 5)
    assert operation.host_us() > 0


def test_a_step_in_process_is_done_in_the_measured_way(own: Matmuld) -> None:
    x, weight, dz = random(9, 8), random(4, 16), random(9, 4)
    passes = np.tile(np.arange(16) % 2 == 0, (9, 1))
    dx, dweight, dbias = (np.empty(shape, np.float32) for shape in ((9, 16), (16, 8), 16))
    step = HiddenGradient(
        *(dz, weight, dx, Options("COMPUTE_32F"), pack_mask(passes.T), "relu_aux"),
        *(x, dweight, dbias),
    )
    work = own.step(step, "dx", "dweight", "dbias")
    work.run()
    masked = f64(dz) @ f64(weight) * passes
    expected = masked, masked.T @ f64(x), masked.sum(axis=0)
    for found, wanted in zip(work.outputs(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_held_in_process_is_forgotten_with_its_plans(own: Matmuld) -> None:
    header = headers.forward(*map(own.hold, (random(2, 3), random(4, 3), random(4))))
    own.operation("linear/forward", header).run()
    own.forget()
    assert (len(own.runtime.store), len(own.runtime.pool)) == (0, 0)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving("cpu") as service:
        yield service


def test_requests_go_back_to_back_over_every_connection(service: Service) -> None:
    client, x, weight, bias = service.client, random(5, 8), random(6, 8), random(6)
    held = [client.put(array) for array in (x, weight, bias)]
    targets = [client.zeros((5, 6)) for _ in range(2)]
    names = [tensor.handle for tensor in held]
    requests = [
        request("linear/forward", headers.forward(*names, y=y.handle, aux=True)) for y in targets
    ]
    with service.connections(2) as wires:
        done = back_to_back(wires, requests, 3)
    assert len(done.replies) == len(set(done.handles("aux"))) == 6
    assert done.handles("y") == [target.handle for target in targets for _ in range(3)]
    assert done.us > 0
    expected = np.maximum(f64(x) @ f64(weight).T + f64(bias), 0)
    for target in targets:
        np.testing.assert_allclose(target.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_payload_larger_than_what_a_socket_takes_at_once_is_sent_whole(service: Service) -> None:
    x = random(600, 1024)
    eye = service.client.put(np.eye(1024, dtype=np.float32))
    zeros = service.client.zeros((1024,))
    sent = {"dtype": "float32", "shape": list(x.shape), "payload": 0}
    header = headers.stack(sent, [eye.handle] * 2, [zeros.handle] * 2, None)
    with service.connections(1) as (wire,):
        reply = wire.post(request("mlp/forward", header, x.tobytes()))
        y = np.frombuffer(bytes(unpack(reply)[1][0]), np.float32).reshape(x.shape)
    np.testing.assert_allclose(y, np.maximum(x, 0), rtol=1e-5, atol=1e-5)


def test_all_gradients_of_a_layer_go_into_tensors(service: Service) -> None:
    client, dz, weight, x = service.client, random(5, 6), random(6, 16), random(5, 16)
    zeros = np.zeros((16, 5), np.uint8)
    _, mask = client.linear(x, random(16, 16), activation="relu", save_aux=True)
    mask.replace(zeros)
    into = [client.zeros(shape) for shape in ((5, 16), (6, 16), (6,))]
    held = [client.put(array) for array in (dz, weight, x)]
    names, places = [t.handle for t in (*held, mask)], [t.handle for t in into]
    header = headers.layer_backward(*names, outputs=places)
    with service.connections(1) as (wire,):
        answer = unpack(bytes(wire.post(request("linear/backward", header))))[0]
    assert sorted(answer) == ["dbias", "dweight", "dx"]
    np.testing.assert_array_equal(into[0].numpy(), np.zeros((5, 16)))
    np.testing.assert_allclose(into[1].numpy(), f64(dz).T @ f64(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(into[2].numpy(), f64(dz).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_bars_are_kept_with_the_results(results: GpuResults) -> None:
    kept_bars = json.loads(results.model_dump_json())["bars"]
    assert [Bar.model_validate(bar) for bar in kept_bars] == results.bars
