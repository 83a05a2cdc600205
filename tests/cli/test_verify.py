"""`matmuld verify`: right results pass, wrong ones do not."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import uvicorn
from matmuld.cli import main
from matmuld.cli.cases import EPILOGS, Problem
from matmuld.cli.oracle import (
    FUNCTIONS,
    SLOPES,
    Expected,
    Oracle,
    compare,
    exact,
    pack,
    positive,
    unpack,
)
from matmuld.cli.report import Case, Report, Verdict
from matmuld.cli.sockets import listening
from matmuld.cli.verify import judged, verified
from matmuld.http.app import Application
from matmuld.settings import Settings
from matmuld_client import Client
from rich.console import Console

from ..reference import DTYPES, Host, activate, activation_prime, f64, pack_mask, unpack_mask
from .console import COMMAND, matmuld

SIZE = (65, 43, 21)
CASE = Case("float32", "NONE", SIZE, None, "contiguous, aligned")


def test_every_quick_case_passes(device: str) -> None:
    ended = matmuld("verify", "--quick", "--device", device)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    dtypes, epilogs, sizes, batches, variants, layers = 4, 16, 7, 2, 7, 6
    cases = dtypes * sizes * batches * (epilogs * variants + 2 * layers)
    pairs, results, forward = 3, 3, 10
    cases += pairs * results * sizes * (1 + forward + layers)
    assert f"{cases} cases passed" in ended.stdout


def test_a_part_by_forced_ways_in_an_autotuning_service(device: str) -> None:
    ways = ("--strategy", "split", "--strategy", "gemv", "--autotune", "eager")
    ended = matmuld("verify", "--quick", "--only", "layers", "--device", device, *ways)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\nautotune eager, forced strategies: split, gemv\n" in ended.stdout
    assert "stack, gelu" in ended.stdout
    assert "DRELU" not in ended.stdout


@pytest.mark.parametrize("flag", [("--autotune", "lazy"), ("--strategy", "split")])
def test_a_running_service_is_as_it_is(
    flag: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--url", "http://127.0.0.1:1", *flag]) == 2
    said = capsys.readouterr().err
    assert said.startswith("matmuld: ")
    assert "autotune, strategy: expected without url" in said


def test_its_service_ends_with_it(tmp_path: Path) -> None:
    command, environment = [*COMMAND, "verify"], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"device ")
        (socket,) = tmp_path.glob("matmuld-*/socket")
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    assert not Client(f"unix:{socket}").live()
    assert list(tmp_path.iterdir()) == []


@contextmanager
def wrong_service(path: Path) -> Iterator[Client]:
    """A service that turns the sign of the last number of every product's answer."""
    app = Application(Settings(device="cpu"))

    async def corrupted(scope: Any, receive: Any, send: Any) -> None:
        answers_a_product = scope.get("path") == "/v1/matmul"

        async def forward(message: Any) -> None:
            nonlocal answers_a_product
            answers_a_product &= message.get("status", 200) == 200
            body = message.get("body")
            if answers_a_product and body:
                message = {**message, "body": bytes(body[:-1]) + bytes([body[-1] ^ 0x80])}
            await send(message)

        await app(scope, receive, forward)

    server = uvicorn.Server(uvicorn.Config(corrupted, lifespan="on", log_config=None))
    with listening([f"unix:{path}"]) as sockets:
        thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
        thread.start()
        try:
            with Client(f"unix:{path}") as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def test_a_service_that_is_wrong_in_one_number_is_found_out(tmp_path: Path) -> None:
    with wrong_service(tmp_path / "socket") as client:
        report = verified(client, [(8, 16, 32)], Console(file=StringIO()))
    wrong = {(v.case.dtype, v.case.operation) for v in report.failures}
    products = [v for v in report.verdicts if v.case.operation == "NONE"]
    products += [v for v in report.verdicts if v.case.operation == "float8 NONE"]
    layers = [v for v in report.verdicts if v.case.operation.startswith("linear")]
    assert not any(v.passed for v in products)
    assert all(v.passed for v in layers)
    assert {dtype for dtype, _ in wrong} == set(DTYPES)


def right_answers(problem: Problem, epilog: str, dtype: str) -> dict[str, Host]:
    """The expected outputs themselves, rounded."""
    return {
        name: e.value.astype(np.uint8 if name == "relu_aux" else DTYPES[dtype])
        for name, e in problem.expected(epilog, True).items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilog", EPILOGS)
@pytest.mark.parametrize("batch", [None, 2])
def test_one_wrong_element_of_any_output_is_noticed(
    dtype: str, epilog: str, batch: int | None
) -> None:
    problem = Problem(dtype, SIZE, batch)
    expected = problem.expected(epilog, True)
    for name, answer in right_answers(problem, epilog, dtype).items():
        assert compare(answer, expected[name], dtype).ratio <= 1.0
        at = np.unravel_index(np.argmax(np.abs(f64(answer))), answer.shape)
        wrong = answer.copy()
        wrong[at] = 0 if name == "relu_aux" else wrong[at] * wrong.dtype.type(1.03)
        assert compare(wrong, expected[name], dtype).ratio > 1.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_off_by_infinity(poison: float) -> None:
    answer = np.array([1.0, 2.0], np.float32)
    expected = Expected(f64(answer), np.full(2, 1e-6))
    assert compare(answer, expected, "float32").ratio == 0.0
    answer[1] = poison
    assert compare(answer, expected, "float32").ratio == math.inf


def test_another_shape_or_dtype_is_off_by_infinity() -> None:
    expected = Expected(np.ones(3), np.full(3, 1e-6))
    assert compare(np.ones((3, 1), np.float32), expected, "float32").ratio == math.inf
    found = compare(np.ones(3), expected, "float32")
    assert (found.ratio, found.detail) == (math.inf, "expected float32[3], got float64[3]")


def test_a_product_with_operands_rounded_to_tf32_is_noticed() -> None:
    problem = Problem("float32", (64, 100, 500), None)
    expected = problem.expected("NONE", False)["d"]
    a, b = (_tf32(operand) for operand in (problem.a, problem.b))
    assert compare(problem.a @ problem.b, expected, "float32").ratio <= 1.0
    assert compare(a @ b, expected, "float32").ratio > 1.0


def _tf32(array: Host) -> Host:
    """With ten bits of fraction."""
    half = np.uint32(1 << 12)
    return ((array.view(np.uint32) + half) & ~np.uint32((1 << 13) - 1)).view(np.float32)


def test_a_sum_kept_in_bfloat16_is_noticed() -> None:
    problem = Problem("bfloat16", (8, 8, 64), None)
    expected = problem.expected("NONE", False)["d"]
    total = np.zeros((8, 8), ml_dtypes.bfloat16)
    for k in range(64):
        total += np.outer(problem.a[:, k], problem.b[k])
    assert compare(total, expected, "bfloat16").ratio > 1.0


def test_the_erf_form_of_gelu_is_noticed() -> None:
    problem = Problem("float32", SIZE, None)
    z = f64(problem.a) @ f64(problem.b)
    erf = z * 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    expected = problem.expected("GELU", False)["d"]
    assert compare(erf.astype(np.float32), expected, "float32").ratio > 1.0


def test_mask_bits_near_zero_are_free_and_all_others_are_not() -> None:
    expected = positive(Expected(np.array([1.0, 1e-9, -1.0]), np.full(3, 1e-6)))
    for uncertain in (0, 1):
        answer = np.array([1, uncertain, 0], np.uint8)
        assert compare(answer, expected, "float32").ratio <= 1.0
    assert compare(np.array([0, 1, 0], np.uint8), expected, "float32").ratio > 1.0
    assert compare(np.array([1, 1, 1], np.uint8), expected, "float32").ratio > 1.0


def test_the_oracle_agrees_with_the_reference_of_the_tests() -> None:
    z = np.linspace(-9, 9, 2001)
    for name, function in FUNCTIONS.items():
        np.testing.assert_allclose(function(z), activate(name, z), atol=1e-14)
        np.testing.assert_allclose(SLOPES[name](z), activation_prime(name, z), atol=1e-14)
    mask = np.random.default_rng(0).integers(0, 2, (2, 130, 5), np.uint8)
    assert np.array_equal(unpack(pack_mask(mask == 1), 130), mask)
    assert np.array_equal(unpack_mask(pack(mask), 130), mask == 1)
    assert pack(mask).strides == pack_mask(mask == 1).strides


def test_a_gradient_past_a_relu_in_doubt_may_be_any_that_was_possible() -> None:
    oracle, exactly_zero = Oracle("bfloat16"), Expected(np.zeros(1), np.full(1, 1e-6))
    gradient = Expected(np.ones(1), np.full(1, 0.01))
    allowed = oracle.rounded(oracle.times_slope_at("relu", gradient, exactly_zero))
    largest = (gradient.value + gradient.tolerance).astype(ml_dtypes.bfloat16)
    assert compare(largest, allowed, "bfloat16").ratio <= 1.0
    assert compare(largest * 1.02, allowed, "bfloat16").ratio > 1.0


def test_numbers_given_are_exact() -> None:
    given = exact(np.array([0.5], np.float32))
    assert (given.value[0], given.tolerance[0]) == (0.5, 0.0)


def test_a_refusal_is_a_failure_in_the_services_words(tmp_path: Path) -> None:
    with wrong_service(tmp_path / "socket") as client:

        def refused() -> Any:
            return client.matmul(np.ones((2, 3), np.float32), np.ones((4, 5), np.float32))

        verdict = judged(client, CASE, refused)
    assert not verdict.passed
    assert verdict.detail.startswith("InvalidOperands: b: expected K = 3")


def test_the_report_has_failures_first_and_all_cells() -> None:
    right = Verdict(CASE._replace(operation="RELU", dtype="float16"), 0.5, "d: off by 1, 2 allowed")
    wrong = Verdict(CASE, 3.0, "d: off by 6, 2 allowed")
    text = StringIO()
    report = Report([right, wrong, right], {"fused": 2, "split": 1}, 1.0)
    report.print(Console(file=text, width=160))
    said = text.getvalue()
    assert report.failures == [wrong]
    assert said.index("d: off by 6") < said.index("2/2  0.50") < said.index("0/1  3.00")
    assert "products: 2 fused, 1 split" in said
    assert "1 of 3 cases failed" in said
