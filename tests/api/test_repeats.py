"""Requests whose headers have come before: known at once, and never taken for another."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld.service import Service
from matmuld.steps import Steps

from ..local import Wire, decoded, packed, raw, running, tensor
from ..reference import DTYPES, Host, activate, assert_close, f64, random
from .refusals import BACKWARD, FORWARD, MLP_BACKWARD, MLP_FORWARD, refused_header, wait_for

X = np.arange(6, dtype=np.float32).reshape(2, 3)
EYE = np.eye(3, dtype=np.float32)
HEADER = {"x": tensor(X, 0), "weight": tensor(EYE, 1)}


def test_a_repeated_header_computes_with_the_new_payloads(wire: Wire) -> None:
    for factor in (1, 2, 3):
        answer = wire.send(FORWARD, HEADER, raw(X * factor), raw(EYE))
        np.testing.assert_array_equal(answer.array("y"), X * factor)


def test_headers_of_one_length_are_told_apart(wire: Wire) -> None:
    for _ in range(3):
        for alpha in (0.5, 2.0, -1.0):
            answer = wire.send(FORWARD, HEADER | {"alpha": alpha}, raw(X), raw(EYE))
            np.testing.assert_array_equal(answer.array("y"), alpha * X)


def test_the_operation_is_part_of_what_is_known(wire: Wire) -> None:
    header = {"x": tensor(X, 0), "weight": tensor(EYE, 1)}
    assert wire.send(FORWARD, header, raw(X), raw(EYE)).status == 200
    refused_header(
        wire, BACKWARD, header, raw(X), raw(EYE), code="malformed", operand="dz", says="dz"
    )


def test_payloads_of_a_known_header_are_checked_again(wire: Wire) -> None:
    header = HEADER | {"alpha": 3.0}
    for _ in range(3):
        assert wire.send(FORWARD, header, raw(X), raw(EYE)).status == 200
    refused_header(
        wire,
        FORWARD,
        header,
        raw(X)[:-4],
        raw(EYE) + b"1234",
        code="invalid_operands",
        operand="x",
        says="x: expected 24 bytes for shape [2, 3] of float32, got 20",
    )
    refused_header(
        wire,
        FORWARD,
        header,
        raw(X) + raw(EYE) + b"\0\0",
        code="malformed",
        operand="weight",
        says="weight: expected a payload index below 1, got 1",
    )


def test_a_known_header_uses_what_the_tensor_holds_now_and_notices_when_it_is_gone(
    wire: Wire,
) -> None:
    handle = wire.hold(EYE)
    header = {"x": tensor(X, 0), "weight": {"tensor": handle}}
    for _ in range(3):
        np.testing.assert_array_equal(wire.send(FORWARD, header, raw(X)).array("y"), X)
    body = packed({"value": tensor(EYE, 0)}, raw(2 * EYE))
    replaced = wire.request(
        "PUT", f"/v1/tensors/{handle}", body, {"Content-Type": "application/msgpack"}
    )
    assert replaced.status == 200
    for _ in range(3):
        np.testing.assert_array_equal(wire.send(FORWARD, header, raw(X)).array("y"), 2 * X)
    assert wire.request("DELETE", f"/v1/tensors/{handle}").status == 204
    refused_header(
        wire, FORWARD, header, raw(X), code="gone", operand="weight", says="was freed or has"
    )


def test_nothing_known_keeps_a_tensor_or_a_tape_alive(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with running(path, device="cpu") as app:
        wire = Wire(path)
        before = wire.get("/v1/info")["memory"]["free_bytes"]
        handle = wire.hold(np.ones((300, 3), np.float32))
        header: dict[str, Any] = {"x": tensor(X, 0), "weight": {"tensor": handle}}
        for _ in range(3):
            assert wire.send(FORWARD, header, raw(X)).status == 200
        header = {"x": tensor(X, 0), "layers": [{"weight": {"tensor": handle}}], "save_tape": True}
        for _ in range(2):
            tape = wire.send(MLP_FORWARD, header, raw(X)).header["tape"]["tensor"]
            dy = np.ones((2, 300), np.float32)
            backward = {"tape": tape, "dy": tensor(dy, 0)}
            assert wire.send(MLP_BACKWARD, backward, raw(dy)).status == 200
        assert wire.request("DELETE", f"/v1/tensors/{handle}").status == 204
        gc.collect()
        assert wire.get("/v1/info")["memory"]["free_bytes"] == before
        assert app.service is not None
        assert len(app.service.steps) == 2
        assert len(app.service.recordings) == 0
        wire.close()


def test_only_so_many_headers_are_known(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with running(path, device="cpu") as app:
        wire = Wire(path)
        for alpha in range(Steps.LIMIT + 50):
            header = HEADER | {"alpha": float(alpha)}
            answer = wire.send(FORWARD, header, raw(X), raw(EYE))
            np.testing.assert_array_equal(answer.array("y"), alpha * X)
        assert app.service is not None
        assert len(app.service.steps) == Steps.LIMIT
        wire.close()


def test_long_headers_are_known_up_to_so_many_bytes(tmp_path: Path) -> None:
    weight = tensor(EYE, 1, strides=[3, 1], kind="tensor", offset=0)
    layers = [{"weight": weight, "activation": "none", "bias": None}] * 64
    with running(tmp_path / "s", device="cpu") as app:
        wire = Wire(tmp_path / "s")
        assert app.service is not None
        steps = app.service.steps
        for number in range(900):
            options = {"sm_count_target": 100_000 + number}
            header = {"x": tensor(X, 0), "layers": layers, "options": options}
            answer = wire.send(MLP_FORWARD, header, raw(X), raw(EYE))
            np.testing.assert_array_equal(answer.array("y"), X)
        assert steps.nbytes <= Steps.BYTES
        assert 500 < len(steps) < 800
        wire.close()


def test_a_known_header_before_broken_payloads_is_malformed(wire: Wire) -> None:
    header = HEADER | {"alpha": 7.0}
    body = packed(header, raw(X), raw(EYE))
    content = {"Content-Type": "application/msgpack"}
    for _ in range(3):
        assert wire.request("POST", FORWARD, body, content).status == 200
    start = len(packed(header))
    for at in (*range(start, start + 2), start + 2 + X.nbytes, start + 3 + X.nbytes):
        for wrong in (0x00, 0xC1, 0xFF):
            broken = body[:at] + bytes([wrong]) + body[at + 1 :]
            answer = wire.request("POST", FORWARD, broken, content)
            assert (answer.status, answer.header["code"]) == (400, "malformed"), answer.header


@contextmanager
def service(tmp_path: Path, device: str, **settings: Any) -> Iterator[tuple[Service, Wire]]:
    path = tmp_path / "s"
    with running(path, device=device, **settings) as app:
        wire = Wire(path)
        assert app.service is not None
        yield app.service, wire
        wire.close()


def held(wire: Wire, handle: str) -> Host:
    answer = wire.request("GET", f"/v1/tensors/{handle}", headers={"Accept": "application/msgpack"})
    return decoded(answer.header["value"], answer.payloads)


def test_a_step_is_recorded_when_it_comes_again(tmp_path: Path, device: str) -> None:
    with service(tmp_path, device) as (its, wire):
        for factor in range(1, 7):
            answer = wire.send(FORWARD, HEADER, raw(X * factor), raw(EYE * factor))
            np.testing.assert_array_equal(answer.array("y"), X * factor**2)
            assert len(its.recordings) == (factor > 1)
        stats = its.runtime.pool.stats
        assert (stats.planned, stats.hits) == (1, 5)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_repetition_is_right(wire: Wire, dtype: str, activation: str) -> None:
    rng = np.random.default_rng(3)
    weight, bias = random(rng, (5, 8), dtype), random(rng, (5,), dtype)
    for _ in range(5):
        x = random(rng, (4, 8), dtype)
        header = {
            "x": tensor(x, 0),
            "weight": tensor(weight, 1),
            "bias": tensor(bias, 2),
            "activation": activation,
        }
        answer = wire.send(FORWARD, header, raw(x), raw(weight), raw(bias))
        expected = activate(activation, f64(x) @ f64(weight).T + f64(bias))
        scale = np.abs(f64(x)) @ np.abs(f64(weight).T) + np.abs(f64(bias))
        gelu = activation == "gelu"
        assert_close(answer.array("y"), expected, scale, dtype, approximate=gelu)


def test_gradients_and_stacks_are_repeated_too(wire: Wire) -> None:
    rng = np.random.default_rng(4)
    weights = [random(rng, shape, "float64") for shape in ((6, 3), (4, 6), (2, 4))]
    handles = [wire.hold(weight) for weight in weights]
    layers = [{"weight": {"tensor": handle}, "activation": "relu"} for handle in handles]
    for _ in range(5):
        x, dz = random(rng, (7, 3), "float64"), random(rng, (7, 6), "float64")
        y = wire.send(MLP_FORWARD, {"x": tensor(x, 0), "layers": layers}, raw(x)).array("y")
        expected = x
        for weight in weights:
            expected = np.maximum(expected @ weight.T, 0)
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
        header = {"dz": tensor(dz, 0), "x": tensor(x, 1), "weight": {"tensor": handles[0]}}
        answer = wire.send(BACKWARD, header, raw(dz), raw(x))
        np.testing.assert_allclose(answer.array("dx"), dz @ weights[0], rtol=1e-12)
        np.testing.assert_allclose(answer.array("dweight"), dz.T @ x, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(answer.array("dbias"), dz.sum(axis=0), rtol=1e-12, atol=1e-13)


def test_results_that_are_held_are_not_written_again(wire: Wire) -> None:
    header = HEADER | {"activation": "relu", "save_aux": True, "outputs": {"y": "tensor"}}
    kept = []
    for factor in range(1, 6):
        answer = wire.send(FORWARD, header, raw(X * factor), raw(EYE))
        kept.append((factor, answer.header["y"]["tensor"], answer.header["aux"]["tensor"]))
    assert len({handle for _, *handles in kept for handle in handles}) == 10
    for factor, y, aux in kept:
        np.testing.assert_array_equal(held(wire, y), X * factor)
        backward = {"dy": tensor(X, 0), "aux": {"tensor": aux}, "wants": ["dbias"]}
        answer = wire.send(BACKWARD, backward, raw(X))
        np.testing.assert_array_equal(answer.array("dbias"), X.sum(axis=0))


def test_a_tensor_that_takes_each_result(wire: Wire) -> None:
    target, weight = wire.hold(np.zeros((2, 3), np.float32)), wire.hold(EYE)
    header = {
        "x": tensor(X, 0),
        "weight": {"tensor": weight},
        "outputs": {"y": {"tensor": target}},
    }
    for factor in range(1, 6):
        assert wire.send(FORWARD, header, raw(X * factor)).status == 200
        np.testing.assert_array_equal(held(wire, target), X * factor)


def test_a_sum_that_grows_with_every_repetition(wire: Wire) -> None:
    total = wire.hold(np.zeros((3, 3), np.float32))
    header = {
        "dz": tensor(X, 0),
        "x": tensor(X, 1),
        "wants": ["dweight"],
        "outputs": {"dweight": {"tensor": total, "alpha": 1.0, "beta": 1.0}},
    }
    for times in range(1, 6):
        assert wire.send(BACKWARD, header, raw(X), raw(X)).status == 200
        np.testing.assert_array_equal(held(wire, total), times * (X.T @ X))


def test_one_tensor_read_and_written(wire: Wire) -> None:
    handle = wire.hold(X)
    header = {
        "x": {"tensor": handle},
        "weight": tensor(EYE, 0),
        "outputs": {"y": {"tensor": handle}},
    }
    for times in range(1, 6):
        assert wire.send(FORWARD, header, raw(2 * EYE)).status == 200
        np.testing.assert_array_equal(held(wire, handle), X * 2**times)


def test_plans_that_were_freed_are_made_again(wire: Wire) -> None:
    header = HEADER | {"alpha": 5.0}
    for _ in range(3):
        for _ in range(3):
            answer = wire.send(FORWARD, header, raw(X), raw(EYE))
            np.testing.assert_array_equal(answer.array("y"), 5 * X)
        assert wire.request("DELETE", "/v1/plans").status == 200


def test_a_tensor_whose_time_is_over_is_gone_for_repetitions_too(
    tmp_path: Path, device: str
) -> None:
    with service(tmp_path, device, ttl_s=0.3, janitor_s=60.0) as (_, wire):
        header = {"x": tensor(X, 0), "weight": {"tensor": wire.hold(EYE)}}
        end = time.monotonic() + 0.5
        while time.monotonic() < end:  # each use starts its time again
            assert wire.send(FORWARD, header, raw(X)).status == 200
            time.sleep(0.01)
        time.sleep(0.35)
        assert wire.send(FORWARD, header, raw(X)).header["code"] == "gone"


def test_recordings_are_bounded_and_go_with_their_steps(tmp_path: Path, device: str) -> None:
    with service(tmp_path, device, recording_bytes=2000) as (its, wire):
        for alpha in range(1, 100):
            header = HEADER | {"alpha": float(alpha)}
            for _ in range(3):
                answer = wire.send(FORWARD, header, raw(X), raw(EYE))
                np.testing.assert_array_equal(answer.array("y"), alpha * X)
            assert 0 < its.recordings.nbytes <= 2000
        assert 1 < len(its.recordings) < 50
        big = np.ones((100, 3), np.float32)
        for _ in range(3):
            answer = wire.send(
                FORWARD, {"x": tensor(big, 0), "weight": tensor(EYE, 1)}, raw(big), raw(EYE)
            )
            np.testing.assert_array_equal(answer.array("y"), big)


def test_repetitions_at_once_do_not_mix(socket_path: Path) -> None:
    """Replies larger than a socket takes at once, on many connections."""

    def ask(number: int) -> None:
        wire = Wire(socket_path)
        for times in range(20):
            x = np.full((64, rows), number * 100 + times, np.float32)
            answer = wire.send(
                FORWARD, {"x": tensor(x, 0), "weight": tensor(identity, 1)}, raw(x), raw(identity)
            )
            np.testing.assert_array_equal(answer.array("y"), x)
        wire.close()

    for rows in (4, 250, 1000):
        identity = np.eye(rows, dtype=np.float32)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(8)))


def test_a_payload_beside_a_held_result_is_of_its_own_request(socket_path: Path) -> None:
    header = {"x": tensor(X, 0), "weight": tensor(EYE, 1), "activation": "relu", "save_aux": True}

    def ask(factor: int) -> None:
        wire = Wire(socket_path)
        for _ in range(60):
            answer = wire.send(FORWARD, header, raw(factor * X), raw(EYE))
            np.testing.assert_array_equal(answer.array("y"), factor * X)
            handle = answer.header["aux"]["tensor"]
            assert wire.request("DELETE", f"/v1/tensors/{handle}").status == 204
        wire.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, range(1, 7)))


def test_a_slow_reader_gets_the_bytes_of_its_own_requests(tmp_path: Path) -> None:
    """Replies of about as much as goes out in one piece, none of them read until all are made."""
    for columns in (15_000, 16_376, 16_384, 20_000):
        with service(tmp_path, "cpu") as (_, wire):
            identity = wire.hold(np.ones((columns, 1), np.float32))
            ones = np.ones((1, 1), np.float32)
            header = {"x": tensor(ones, 0), "weight": {"tensor": identity}}
            slow = socket.socket(socket.AF_UNIX)
            slow.connect(str(tmp_path / "s"))
            for factor in range(1, 9):
                body = packed(header, raw(factor * ones))
                head = f"POST {FORWARD} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                slow.sendall(f"{head}Content-Type: application/msgpack\r\n\r\n".encode() + body)
            for _ in range(5):
                assert wire.send(FORWARD, header, raw(99 * ones)).status == 200
            with slow.makefile("rb") as stream:
                for factor in range(1, 9):
                    while (line := stream.readline().lower()) != b"\r\n":
                        if line.startswith(b"content-length:"):
                            length = int(line.split()[1])
                    y = np.frombuffer(stream.read(length)[-4 * columns :], np.float32)
                    np.testing.assert_array_equal(y, np.full(columns, factor, np.float32))
            slow.close()
        (tmp_path / "s").unlink()


def test_recordings_of_freed_plans_and_of_freed_targets_are_closed(
    tmp_path: Path, device: str
) -> None:
    with service(tmp_path, device) as (its, wire):
        weight = random(np.random.default_rng(0), (70, 70), "bfloat16")
        handle = wire.hold(weight)
        before = wire.get("/v1/info")["memory"]["used_bytes"]
        for alpha in range(1, 20):
            x = random(np.random.default_rng(alpha), (alpha, 70), "bfloat16")
            held_weight = {"tensor": handle}
            header = {"x": tensor(x, 0), "weight": held_weight} | {"alpha": float(alpha)}
            for _ in range(4):
                assert wire.send(FORWARD, header, raw(x)).status == 200
        assert len(its.recordings) == 19
        assert wire.request("DELETE", "/v1/plans").status == 200
        assert len(its.recordings) == 0
        wait_for(lambda: bool(wire.get("/v1/info")["memory"]["used_bytes"] == before))
        target = wire.hold(np.zeros((2, 3), np.float32))
        into = HEADER | {"outputs": {"y": {"tensor": target}}}
        for _ in range(4):
            assert wire.send(FORWARD, into, raw(X), raw(EYE)).status == 200
        assert len(its.recordings) == 1
        assert wire.request("DELETE", f"/v1/tensors/{target}").status == 204
        assert len(its.recordings) == 0


def test_what_is_kept_for_repetitions_makes_room_for_tensors(tmp_path: Path) -> None:
    limit = 1 << 20
    settings = {"memory_limit": limit, "recording_bytes": limit, "tenant_bytes": limit}
    with service(tmp_path, "cpu", **settings) as (its, wire):
        x = random(np.random.default_rng(0), (100, 100), "bfloat16")
        header = {"x": tensor(x, 0), "weight": tensor(x, 1)}
        for _ in range(4):
            assert wire.send(FORWARD, header, raw(x), raw(x)).status == 200
        assert its.runtime.engine.memory().used > 0
        wire.hold(np.zeros(limit // 4, np.float32))
        assert len(its.recordings) == len(its.runtime.pool) == 0
