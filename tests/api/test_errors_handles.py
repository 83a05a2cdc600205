"""Handles that name nothing, or something else: 404, 410, 409."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..local import Answer, Wire, packed, raw, running, tensor
from .refusals import (
    BACKWARD,
    BODY,
    FORWARD,
    MATMUL,
    MLP_BACKWARD,
    MLP_FORWARD,
    OCTETS,
    TENSORS,
    WEIGHT,
    X,
    refused,
    refused_header,
    unchanged,
    works,
)

DY = np.ones((2, 4), np.float32)

PLACES: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "x": lambda h: (FORWARD, {"x": {"tensor": h}, "weight": tensor(DY, 0)}),
    "weight": lambda h: (FORWARD, {"x": tensor(DY, 0), "weight": {"tensor": h}}),
    "dy": lambda h: (BACKWARD, {"dy": {"tensor": h}, "aux": tensor(DY, 0)}),
    "aux": lambda h: (BACKWARD, {"dy": tensor(DY, 0), "aux": {"tensor": h}}),
    "layers[0].weight": lambda h: (
        MLP_FORWARD,
        {"x": tensor(DY, 0), "layers": [{"weight": {"tensor": h}}]},
    ),
    "tape": lambda h: (MLP_BACKWARD, {"dy": tensor(DY, 0), "tape": h}),
    "b": lambda h: (MATMUL, {"a": tensor(DY, 0), "b": {"tensor": h}}),
    "outputs.y": lambda h: (
        FORWARD,
        {"x": tensor(DY, 0), "weight": tensor(DY, 0), "outputs": {"y": {"tensor": h}}},
    ),
}
ENDPOINTS = [
    ("GET", ""),
    ("GET", "/metadata"),
    ("GET", "/mask"),
    ("PUT", ""),
    ("PATCH", ""),
    ("DELETE", ""),
]


def everywhere(wire: Wire, handle: str, code: str, says: str) -> None:
    """The handle is refused wherever one can stand."""
    for operand, place in PLACES.items():
        path, header = place(handle)
        refused_header(wire, path, header, raw(DY), code=code, operand=operand, says=says)
    for method, part in ENDPOINTS:

        def request(method: str = method, part: str = part) -> Answer:
            body, headers = packed({}), {"Content-Type": "application/msgpack"}
            return wire.request(method, f"{TENSORS}/{handle}{part}", body, headers)

        refused(wire, request, code, None, says)


@pytest.fixture
def tape(wire: Wire) -> Iterator[str]:
    header = {
        "x": tensor(X, 0),
        "layers": [{"weight": tensor(WEIGHT, 1), "activation": "relu"}],
        "save_tape": True,
    }
    handle = wire.send(MLP_FORWARD, header, *BODY).header["tape"]["tensor"]
    yield handle
    wire.request("DELETE", f"{TENSORS}/{handle}")


@pytest.fixture
def held(wire: Wire) -> Iterator[str]:
    """A tensor like `DY`."""
    handle = wire.hold(DY)
    yield handle
    wire.request("DELETE", f"{TENSORS}/{handle}")


@pytest.mark.parametrize("shape", ["x", "{}-{}", "a-b-c", "x" * 54, "x" * 4000, "ä" * 54])
def test_unknown(wire: Wire, shape: str) -> None:
    if not shape.isascii():
        path, header = PLACES["x"](shape)
        refused_header(wire, path, header, raw(DY), code="unknown_handle", operand="x")
        return
    says = f"expected a handle of this service, got '{shape[:80]}'"
    everywhere(wire, shape, "unknown_handle", says)


def test_forged(wire: Wire) -> None:
    """Of this run of the service, but not sealed by it."""
    handle = wire.hold(X)
    wire.request("DELETE", f"{TENSORS}/{handle}")
    for forged in (handle[:-1] + "-", handle[:10] + "g" + handle[11:]):
        everywhere(wire, forged, "unknown_handle", f"of this tenant, {forged} was not issued to it")


def test_freed(wire: Wire) -> None:
    handle = wire.hold(X)
    assert wire.request("DELETE", f"{TENSORS}/{handle}").status == 204
    everywhere(wire, handle, "gone", f"{handle} was freed or has expired")


@pytest.mark.parametrize("janitor_s", [0.01, 1000.0])
def test_expired(tmp_path: Path, janitor_s: float) -> None:
    """Whether or not the janitor has come by."""
    with running(tmp_path / "s", device="cpu", janitor_s=janitor_s):
        wire = Wire(tmp_path / "s")
        works(wire)
        with unchanged(wire):
            handle = wire.hold(X, ttl_s=0.05)
            time.sleep(0.1)
            assert wire.request("GET", f"{TENSORS}/{handle}").status == 410
        everywhere(wire, handle, "gone", f"{handle} was freed or has expired")
        wire.close()


def test_of_another_tenant(tmp_path: Path) -> None:
    """As if it had never been: not even that it exists is told."""
    with running(tmp_path / "s", device="cpu") as app:
        assert app.service is not None
        store = app.service.runtime.store
        handle = store.add("somebody else", app.service.runtime.engine.empty((4,), DY.dtype)).handle
        wire = Wire(tmp_path / "s")
        says = f"expected a handle of this tenant, {handle} was not issued to it"
        everywhere(wire, handle, "unknown_handle", says)
        assert wire.get(TENSORS) == {"tensors": []}
        assert store.get("somebody else", handle).version == 1
        wire.close()


def test_from_before_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "first", device="cpu"):
        wire = Wire(tmp_path / "first")
        handle = wire.hold(X, pinned=True)
        wire.close()
    with running(tmp_path / "second", device="cpu"):
        wire = Wire(tmp_path / "second")
        epoch = wire.get("/v1/info")["epoch"]
        says = f"expected a handle of epoch {epoch}, got {handle}: the service has restarted"
        everywhere(wire, handle, "gone", says)
        wire.close()


@pytest.mark.parametrize("operand", sorted(set(PLACES) - {"tape", "y"}))
def test_a_tape_where_a_tensor_is_due(wire: Wire, tape: str, operand: str) -> None:
    path, header = PLACES[operand](tape)
    says = f"{operand}: expected a ... {tape} is a tape"
    refused_header(wire, path, header, raw(DY), code="conflict", operand=operand, says=says)


@pytest.mark.parametrize(("method", "part"), [("GET", ""), ("GET", "/mask"), ("PUT", "")])
def test_a_tape_has_no_contents(wire: Wire, tape: str, method: str, part: str) -> None:
    def request() -> Answer:
        headers = {"Content-Type": OCTETS, "Accept": OCTETS}
        return wire.request(method, f"{TENSORS}/{tape}{part}", b"", headers)

    refused(wire, request, "conflict", None, f"expected a ... {tape} is a tape")


def test_a_tensor_where_a_tape_is_due(wire: Wire, held: str) -> None:
    path, header = PLACES["tape"](held)
    says = f"tape: expected a tape, {held} is a tensor"
    refused_header(wire, path, header, raw(DY), code="conflict", operand="tape", says=says)


def test_a_tensor_where_an_aux_is_due(wire: Wire, held: str) -> None:
    path, header = PLACES["aux"](held)
    kinds = "relu_aux, gelu_aux, gelu_erf_aux, silu_aux or leaky_relu_aux"
    says = f"aux: expected a {kinds}, {held} is a tensor"
    refused_header(wire, path, header, raw(DY), code="conflict", operand="aux", says=says)
    refused(
        wire,
        lambda: wire.request("GET", f"{TENSORS}/{held}/mask"),
        "conflict",
        None,
        f"expected a relu_aux, {held} is a tensor",
    )
