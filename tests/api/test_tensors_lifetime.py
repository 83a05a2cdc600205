"""How long tensors are held: time to live, pinning, and the janitor that really frees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..local import MSGPACK, Answer, Wire, packed, raw, running, tensor
from .refusals import BACKWARD, FORWARD, OCTETS, TENSORS, footprint, refused_header, wait_for

VALUE = np.ones((100, 100), np.float32)


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Wire]:
    """A service whose janitor comes every 20 ms."""
    with (
        running(tmp_path / "s", device="cpu", janitor_s=0.02, ttl_s=50.0),
        closing(Wire(tmp_path / "s")) as wire,
    ):
        yield wire


def change(wire: Wire, handle: str, **life: Any) -> Answer:
    body = packed(life)
    return wire.request("PATCH", f"{TENSORS}/{handle}", body, {"Content-Type": MSGPACK})


def test_the_janitor_frees_what_nobody_asks_for_again(brief: Wire) -> None:
    before = footprint(brief)
    for _ in range(3):
        brief.hold(VALUE, ttl_s=0.3)
    during = footprint(brief)
    assert during["tensors"] == before["tensors"] + 3
    assert during["bytes"] == before["bytes"] + 3 * VALUE.nbytes
    assert during["used"] == before["used"] + 3 * VALUE.nbytes
    wait_for(lambda: footprint(brief) == before)
    assert brief.get("/v1/info")["tensors"]["expired"] == 3


def test_tapes_and_aux_data_expire_too(tmp_path: Path) -> None:
    with (
        running(tmp_path / "s", device="cpu", janitor_s=0.02, ttl_s=0.3),
        closing(Wire(tmp_path / "s")) as wire,
    ):
        before = footprint(wire)
        layers = [{"weight": tensor(VALUE, 0), "activation": "relu"}]
        header = {"x": tensor(VALUE, 0), "layers": layers, "save_tape": True}
        assert wire.send("/v1/mlp/forward", header, raw(VALUE)).status == 200
        header = {"x": tensor(VALUE, 0), "weight": tensor(VALUE, 0), "activation": "gelu"}
        assert wire.send(FORWARD, {**header, "save_aux": True}, raw(VALUE)).status == 200
        assert footprint(wire)["tensors"] == before["tensors"] + 2
        wait_for(lambda: footprint(wire) == before)


def as_operand(wire: Wire, handle: str) -> Answer:
    header = {"x": {"tensor": handle}, "weight": tensor(VALUE, 0)}
    return wire.send(FORWARD, header, raw(VALUE))


def as_target(wire: Wire, handle: str) -> Answer:
    outputs = {"dweight": {"tensor": handle, "beta": 1.0}}
    header = {"dz": tensor(VALUE, 0), "x": tensor(VALUE, 0), "outputs": outputs}
    return wire.send(BACKWARD, header, raw(VALUE))


def as_contents(wire: Wire, handle: str) -> Answer:
    return wire.request("GET", f"{TENSORS}/{handle}", headers={"Accept": OCTETS})


def as_replaced(wire: Wire, handle: str) -> Answer:
    header = {"value": tensor(VALUE, 0)}
    return wire.send(f"{TENSORS}/{handle}", header, raw(VALUE), method="PUT")


@pytest.mark.parametrize("use", [as_operand, as_target, as_contents, as_replaced])
def test_every_use_starts_the_time_again(brief: Wire, use: Callable[[Wire, str], Answer]) -> None:
    handle = brief.hold(VALUE, ttl_s=0.5)
    for _ in range(8):
        time.sleep(0.1)
        assert use(brief, handle).status == 200
    time.sleep(0.6)
    assert use(brief, handle).status == 410


def test_listing_is_no_use(brief: Wire) -> None:
    handle = brief.hold(VALUE, ttl_s=0.3)
    wait_for(lambda: brief.get(TENSORS) == {"tensors": []})
    assert as_contents(brief, handle).status == 410


def test_pinned_for_ever(brief: Wire) -> None:
    handle = brief.hold(VALUE, ttl_s=0.05, pinned=True)
    time.sleep(0.3)
    assert brief.get(f"{TENSORS}/{handle}/metadata")["expires_in_s"] is None
    assert as_contents(brief, handle).body == raw(VALUE)


def test_pinned_and_let_go(brief: Wire) -> None:
    handle = brief.hold(VALUE, ttl_s=0.3)
    answer = change(brief, handle, pinned=True)
    assert (answer.status, answer.header["pinned"]) == (200, True)
    assert answer.header["expires_in_s"] is None
    time.sleep(0.5)
    answer = change(brief, handle, pinned=False)
    assert 0 < answer.header["expires_in_s"] <= 0.3
    wait_for(lambda: brief.get(TENSORS) == {"tensors": []})


def test_the_time_is_changed(brief: Wire) -> None:
    handle = brief.hold(VALUE)
    assert brief.get(f"{TENSORS}/{handle}/metadata")["ttl_s"] == 50
    answer = change(brief, handle, ttl_s=1000)
    assert (answer.header["ttl_s"], answer.header["version"]) == (1000, 1)
    assert 990 < answer.header["expires_in_s"] <= 1000
    answer = change(brief, handle, pinned=True, ttl_s=0.1)
    assert (answer.header["ttl_s"], answer.header["pinned"]) == (0.1, True)
    change(brief, handle, pinned=False)
    wait_for(lambda: brief.get(TENSORS) == {"tensors": []})


@pytest.mark.parametrize(
    ("life", "operand", "says"),
    [
        ({"ttl_s": 0}, "ttl_s", "expected greater than 0, got 0"),
        ({"ttl_s": -1.5}, "ttl_s", "expected greater than 0, got -1.5"),
        ({"ttl_s": float("nan")}, "ttl_s", "expected ... got nan"),
        ({"ttl_s": "1"}, "ttl_s", "expected a valid number, got '1'"),
        ({"pinned": 1}, "pinned", "expected a valid boolean, got 1"),
        ({"version": 1}, "version", "unknown field, got 1"),
    ],
)
def test_lives_that_cannot_be(wire: Wire, life: dict[str, Any], operand: str, says: str) -> None:
    handle = wire.hold(VALUE)
    refused_header(
        wire,
        f"{TENSORS}/{handle}",
        life,
        code="malformed",
        operand=operand,
        says=f"{operand}: {says}",
        method="PATCH",
    )
    wire.request("DELETE", f"{TENSORS}/{handle}")
