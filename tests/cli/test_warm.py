"""`matmuld serve --warm FILE`, and a service that is started again on what an earlier one kept."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from matmuld.settings import Settings
from matmuld.store import InMemoryChoices
from matmuld_client import Client, Layer

from ..local import Wire, running
from .console import matmuld, serving

X = {"dtype": "float32", "shape": [8, 16]}
WEIGHT = {"dtype": "float32", "shape": [4, 16]}
LINEAR = {"operation": "linear/forward", "header": {"x": X, "weight": WEIGHT}}
STACK = {
    "operation": "mlp/forward",
    "header": {"x": X, "layers": [{"weight": WEIGHT, "activation": "relu"}], "save_tape": True},
}
LONG = {
    "operation": "matmul",
    "header": {"a": {"dtype": "float64", "shape": [1200, 1200]}}
    | {"b": {"dtype": "float64", "shape": [1200, 1200]}},
}
STRATEGY = {"way": "split", "median_us": 7.0, "candidates": {"fused": 9.0}, "measured_at": 0.0}


def written(folder: Path, *requests: dict[str, Any]) -> Path:
    path = folder / "warm.json"
    path.write_text(json.dumps({"requests": requests}))
    return path


def await_ready(wire: Wire) -> None:
    deadline = monotonic() + 60
    while wire.request("GET", "/health/ready").status != 200:
        assert monotonic() < deadline
        sleep(0.01)


def test_what_is_warm_is_not_planned_again(tmp_path: Path) -> None:
    with running(tmp_path / "s", device="cpu", warm=written(tmp_path, LINEAR, STACK)):
        wire = Wire(tmp_path / "s")
        await_ready(wire)
        wire.close()
        with Client(f"unix:{tmp_path}/s") as client:
            planned = client.plans()["stats"]["planned"]
            x, weight = np.ones((8, 16), np.float32), np.ones((4, 16), np.float32)
            client.linear(x, weight)
            client.mlp(x, [Layer(weight, activation="relu")], save_tape=True)
            assert 0 < planned == client.plans()["stats"]["planned"]


def test_a_service_is_alive_at_once_and_ready_when_it_is_warm(tmp_path: Path) -> None:
    with running(tmp_path / "s", device="cpu", warm=written(tmp_path, *([LONG] * 10))) as app:
        wire = Wire(tmp_path / "s")
        early = wire.request("GET", "/health/ready")
        assert early.status == 503, "the products to rehearse are too short for this machine"
        assert early.headers["content-type"] == "application/problem+json"
        assert (early.header["code"], early.header["type"]) == ("starting", "urn:matmuld:starting")
        assert wire.get("/health/live") == {"status": "live"}
        with Client(f"unix:{tmp_path}/s") as client:
            assert (client.live(), client.ready()) == (True, False)
            y = client.linear(np.ones((2, 3), np.float32), np.ones((4, 3), np.float32))
            np.testing.assert_array_equal(y, np.full((2, 4), 3, np.float32))
        await_ready(wire)
        assert app.service is not None
        assert not app.service.starting
        assert wire.get("/v1/info")["plans"]["hits"] == 9
        wire.close()


def test_a_service_can_be_stopped_while_it_starts(tmp_path: Path) -> None:
    began = monotonic()
    with running(tmp_path / "s", device="cpu", warm=written(tmp_path, *([LONG] * 1000))):
        pass
    assert monotonic() - began < 20


def test_what_there_is_no_memory_for_stays_cold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, LONG, LINEAR)
    with running(tmp_path / "s", device="cpu", warm=path, memory_limit=1 << 20):
        wire = Wire(tmp_path / "s")
        await_ready(wire)
        assert wire.get("/v1/info")["plans"]["planned"] == 1
        wire.close()
    (cold,) = [text for text in caplog.messages if "stays cold" in text]
    assert cold.startswith("warm: requests[0] stays cold: 11520000 bytes are needed")


WRONG = {"x": X, "weight": {"dtype": "float32", "shape": [4, 15]}}
BAD_FILES: dict[str, tuple[str, str]] = {
    "empty": ("", "is not JSON: Expecting value: line 1 column 1"),
    "syntax": ('{\n"requests": [,]\n}', "is not JSON: Expecting value: line 2 column 14"),
    "not text": ("\udcff", "is not JSON: "),
    "deep": ("[" * 100_000, "is not JSON: "),
    "a list": ("[]", ": header: expected a map, got []"),
    "no requests": ("{}", ": requests: expected, is missing"),
    "unknown field": ('{"requests": [], "x": 1}', ": x: unknown field, got 1"),
    "operation": (
        json.dumps({"requests": [LINEAR, {"operation": "conv", "header": {}}]}),
        ": requests[1].operation: expected ",
    ),
    "header": (
        json.dumps({"requests": [LINEAR, {"operation": "matmul", "header": {"a": X}}]}),
        ": requests[1]: b: expected, is missing",
    ),
    "operands": (
        json.dumps({"requests": [{"operation": "linear/forward", "header": WRONG}]}),
        ": requests[0]: x: expected shape […, batch, 15]",
    ),
}


@pytest.mark.parametrize(("text", "complaint"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_stops_the_start(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "warm.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    listen = f"unix:{tmp_path}/socket"
    refused = matmuld("serve", "--device", "cpu", "--listen", listen, "--warm", str(path))
    assert refused.returncode == 1
    said = refused.stderr.splitlines()[-1]
    assert said.startswith(f"matmuld: warm: {path}")
    assert complaint in said
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_named() -> None:
    refused = matmuld("serve", "--device", "cpu", "--warm", "/nowhere.json")
    last = refused.stderr.splitlines()[-1]
    assert last == "matmuld: warm: cannot read /nowhere.json: No such file or directory"


def test_serve_tells_when_it_is_warm(tmp_path: Path) -> None:
    path = written(tmp_path, LINEAR)
    address = f"unix:{tmp_path}/socket"
    with serving("--device", "cpu", "--listen", address, "--warm", str(path)) as service:
        assert service.process.stderr is not None
        assert "warm: 1 requests, 1 plans" in service.process.stderr.readline()


def test_choices_outlive_the_service(tmp_path: Path) -> None:
    for start in range(2):
        with running(tmp_path / f"s{start}", device="cpu", plan_store=tmp_path / "plans") as app:
            assert app.service is not None
            choices = app.service.runtime.choices
            assert choices.get("strategy", "key") == (STRATEGY if start else None)
            choices.put("strategy", "key", STRATEGY)
            wire = Wire(tmp_path / f"s{start}")
            told = wire.get("/v1/info")["choices"]
            assert told == {"hits": start, "misses": 1 - start, "written": 1, "dropped": 0}
            wire.close()


def test_another_device_finds_nothing(tmp_path: Path) -> None:
    with running(tmp_path / "s", device="cpu", plan_store=tmp_path / "plans") as app:
        assert app.service is not None
        fingerprint = app.service.runtime.engine.fingerprint()
        app.service.runtime.choices.put("strategy", "key", STRATEGY)
    (device,) = (tmp_path / "plans").glob("*/device.json")
    kept = json.loads(device.read_text())
    assert kept.items() > fingerprint.items()
    assert set(kept) == {"cpu", "cores", "numpy", "matmuld"}


def test_a_store_can_be_off(tmp_path: Path) -> None:
    with running(tmp_path / "s", device="cpu", plan_store="off") as app:
        assert app.service is not None
        assert isinstance(app.service.runtime.choices, InMemoryChoices)


def test_the_store_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MATMULD_PLAN_STORE")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Settings().plan_store == tmp_path / "matmuld" / "plans"
    for given in ("", "relative"):  # to be ignored, says the specification
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert Settings().plan_store == Path("/home/somebody/.cache/matmuld/plans")
    monkeypatch.setenv("MATMULD_PLAN_STORE", "~/kept")
    assert Settings().plan_store == Path("/home/somebody/kept")
