"""Every way of every step through the service, and services that measure which is best."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld import replies
from matmuld.cli.verify import Part, verified
from matmuld.strategies import NAMES
from matmuld_client import Accumulate, Client, Layer
from rich.console import Console

from ..local import running
from ..reference import Host, activate, assert_close, f64, random

SIZES = [(33, 17, 65), (1, 1, 1), (1, 5, 3), (7, 1, 4)]
"""M, N, K."""
SHORT = {"autotune_s": 0.001}


@contextmanager
def service(tmp_path: Path, device: str, **settings: Any) -> Iterator[Client]:
    path = tmp_path / "s"
    with running(path, device=device, **settings), Client(f"unix:{path}") as client:
        yield client


def check(client: Client, part: Part, sizes: int = len(SIZES)) -> None:
    """Products or layers against float64."""
    report = verified(client, SIZES[:sizes], Console(file=StringIO()), [part])
    assert not report.failures, report.failures[:3]
    assert len(report.verdicts) > 100


def check_accumulation(client: Client, rng: np.random.Generator, size: tuple[int, ...]) -> None:
    """dweight, with and without dbias, added to what is there."""
    batch, inputs, outputs = size
    dz, x = random(rng, (batch, outputs), "float32"), random(rng, (batch, inputs), "float32")
    old, old_bias = random(rng, (outputs, inputs), "float32"), random(rng, (outputs,), "float32")
    alpha, beta = -0.5, 1.75
    expected = alpha * (f64(dz).T @ f64(x)) + beta * f64(old)
    scale = np.abs(f64(dz)).T @ np.abs(f64(x)) + np.abs(f64(old))
    for wants in (["dweight"], ["dweight", "dbias"]):
        with client.put(old) as weight, client.put(old_bias) as bias:
            into = {"dweight": weight, "dbias": bias}
            out = {name: Accumulate(into[name], alpha=alpha, beta=beta) for name in wants}
            for _ in range(2):
                client.linear_backward(x=x, dz=dz, wants=wants, out=out)  # type: ignore[arg-type]
                weight.replace(old)
                bias.replace(old_bias)
            client.linear_backward(x=x, dz=dz, wants=wants, out=out)  # type: ignore[arg-type]
            assert_close(weight.numpy(), expected, scale, "float32")
            if "dbias" in wants:
                sums = alpha * f64(dz).sum(0) + beta * f64(old_bias)
                assert_close(bias.numpy(), sums, np.abs(f64(dz)).sum(0) + 1, "float32")


def check_forward_with_c(client: Client, rng: np.random.Generator, size: tuple[int, ...]) -> None:
    batch, inputs, outputs = size
    x, weight, c = (
        random(rng, shape, "float32")
        for shape in ((batch, inputs), (outputs, inputs), (batch, outputs))
    )
    z = 0.5 * (f64(x) @ f64(weight).T) - 2 * f64(c)
    scale = np.abs(f64(x)) @ np.abs(f64(weight)).T + np.abs(f64(c))
    for activation in ("none", "relu", "silu"):
        y: Any = client.linear(
            x,
            weight,
            c=c,
            alpha=0.5,
            beta=-2.0,
            activation=activation,
        )
        assert_close(y, activate(activation, z), scale, "float32", approximate=True)


def check_sums(client: Client, rng: np.random.Generator) -> None:
    for size in ((1, 1, 1), (1, 6, 4), (5, 1, 3), (5, 3, 1), (40, 70, 33)):
        check_accumulation(client, rng, size)
        check_forward_with_c(client, rng, size)


# Every way


@pytest.mark.parametrize("name", NAMES)
def test_every_way_of_a_layer_is_right(tmp_path: Path, device: str, name: str) -> None:
    with service(tmp_path, device, strategies=[name]) as client:
        assert client.info()["autotune"]["strategies"] == [name]
        check(client, "layers", 2)
        check_sums(client, np.random.default_rng(0))
        assert client.info()["plans"]["leased"] == 0


@pytest.mark.parametrize("name", ["fused", "split"])
def test_every_way_of_a_product_is_right(tmp_path: Path, device: str, name: str) -> None:
    with service(tmp_path, device, strategies=[name]) as client:
        check(client, "products", 1)


# Measured


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_results_are_right_before_and_after_measuring(
    tmp_path: Path, device: str, mode: str
) -> None:
    with service(tmp_path, device, autotune=mode, **SHORT) as client:
        check(client, "layers", 1)
        check_sums(client, np.random.default_rng(0))
        settled(client)
        check(client, "layers", 1)
        check_sums(client, np.random.default_rng(0))
        autotune = client.info()["autotune"]
        assert autotune["settled"] > 50
        assert (autotune["failed"], autotune["mode"]) == (0, mode)


def settled(client: Client) -> dict[str, Any]:
    """What is known of autotuning when nothing waits to be measured."""
    for _ in range(6000):
        known: dict[str, Any] = client.info()["autotune"]
        if not known["pending"]:
            return known
        time.sleep(0.01)
    raise AssertionError("the tuner does not settle")


def layer(client: Client, batch: int = 8) -> Host:
    x, weight = np.ones((batch, 6), np.float32), np.ones((5, 6), np.float32)
    y = client.linear(x, weight, np.ones(5, np.float32), activation="relu")
    assert isinstance(y, np.ndarray)
    return y


def test_plans_tells_how_steps_are_done(tmp_path: Path, device: str) -> None:
    with service(tmp_path, device, autotune="eager", **SHORT) as client:
        np.testing.assert_array_equal(layer(client), np.full((8, 5), 7))
        listed = client.plans()
        (strategy,) = listed["strategies"]
        model = replies.Strategy.model_validate(strategy, strict=True)
        assert (model.step, model.activation, model.settled) == ("Forward", "relu", True)
        assert model.operands["x"].startswith("float32[8,6] strides [6,1]")
        assert set(model.operands) == {"x", "weight", "y", "bias"}
        assert model.way in model.median_us
        assert set(model.median_us) == {"fused", "split"}
        (plan,) = listed["plans"]
        assert plan["tflops"] >= 0
        client.matmul(np.ones((3, 4), np.float32), np.ones((4, 2), np.float32), epilog="BGRADA")
        strategy = client.plans()["strategies"][-1]
        assert (strategy["step"], strategy["epilog"]) == ("Product", "BGRADA")


def test_measuring_is_for_gpus_unless_it_is_asked_for(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MATMULD_AUTOTUNE")
    with service(tmp_path, device) as client:
        assert client.info()["autotune"]["mode"] == ("off" if device == "cpu" else "lazy")


def test_off_and_deterministic_know_nothing_of_ways(tmp_path: Path, device: str) -> None:
    settings: list[dict[str, Any]] = [{"autotune": "off"}, {"deterministic": True}]
    for number, given in enumerate(settings):
        folder = tmp_path / str(number)
        folder.mkdir()
        with service(folder, device, **({"autotune": "eager"} | given)) as client:
            layer(client)
            assert client.plans()["strategies"] == []
            known = client.info()["autotune"]
            assert (known["settled"], known["choices"], known["seconds"]) == (0, 0, 0.0)


def test_what_is_warmed_for_a_deterministic_service_is_deterministic(
    tmp_path: Path, device: str
) -> None:
    header = {
        "x": {"dtype": "float32", "shape": [8, 6]},
        "weight": {"dtype": "float32", "shape": [5, 6]},
        "bias": {"dtype": "float32", "shape": [5]},
        "activation": "relu",
    }
    with service(tmp_path, device, deterministic=True) as client:
        client.warm([("linear/forward", header)])
        (plan,) = client.plans()["plans"]
        assert plan["deterministic"] is True
        layer(client)
        assert client.info()["plans"]["planned"] == 1


def test_a_stored_choice_is_recalled_after_a_restart(tmp_path: Path, device: str) -> None:
    settings: dict[str, Any] = {"autotune": "eager", "plan_store": tmp_path / "store", **SHORT}
    for restart in range(2):
        folder = tmp_path / str(restart)
        folder.mkdir()
        with service(folder, device, **settings) as client:
            layer(client)
            known = client.info()["autotune"]
            assert (known["settled"], known["recalled"]) == (1 - restart, restart)
            assert client.plans()["strategies"][0]["settled"] is True


def test_many_clients_of_one_kind_of_step_wait_for_one_measurement(
    tmp_path: Path, device: str
) -> None:
    path = tmp_path / "s"

    def ask(number: int) -> None:
        with Client(f"unix:{path}") as client:
            x, weight = np.full((4, 6), number, np.float32), np.ones((5, 6), np.float32)
            np.testing.assert_array_equal(client.linear(x, weight), np.full((4, 5), 6 * number))

    with running(path, device=device, autotune="eager"):
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(ask, range(64)))
        with Client(f"unix:{path}") as client:
            assert client.info()["autotune"]["settled"] == 1
            assert client.info()["plans"]["leased"] == 0


def test_nothing_is_held_after_settling(tmp_path: Path) -> None:
    """But for the plans, whose memory goes with them."""
    with service(tmp_path, "cpu", autotune="lazy", recording_bytes=0, **SHORT) as client:
        x, dy = np.ones((9, 6), np.float16), np.ones((9, 4), np.float16)
        weights = [np.ones(shape, np.float16) for shape in ((5, 6), (4, 5))]
        layers = [Layer(weights[0], activation="gelu"), Layer(weights[1])]
        _, tape = client.mlp(x, layers, save_tape=True)
        client.mlp_backward(tape, dy=dy, wants=["dx", "dweight"])
        assert settled(client)["settled"] > 0
        client.evict_plans()
        info = client.info()
        assert info["memory"]["used_bytes"] == 0
        assert info["plans"]["plans"] == info["plans"]["leased"] == 0


def test_a_service_closes_while_it_measures(tmp_path: Path, device: str) -> None:
    with service(tmp_path, device, autotune="lazy", autotune_s=60.0) as client:
        for batch in range(1, 30):
            layer(client, batch)
        assert client.info()["autotune"]["pending"] > 0
        began = time.monotonic()
    assert time.monotonic() - began < 5
