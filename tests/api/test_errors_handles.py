"""Handles that name nothing, or something else: 404, 410, 409; auxiliary data that does not belong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..local import Answer, Wire, packed, raw, running, tensor
from ..reference import pack_mask
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
    "y": lambda h: (
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


@pytest.fixture
def auxes(wire: Wire) -> Iterator[dict[str, str]]:
    """Handles of a relu_aux and a gelu_aux of 4 outputs and a batch of 2."""
    handles = {}
    for activation in ("relu", "gelu"):
        header = {"x": tensor(X, 0), "weight": tensor(WEIGHT, 1), "activation": activation}
        answer = wire.send(FORWARD, {**header, "save_aux": True}, *BODY)
        handles[f"{activation}_aux"] = answer.header["aux"]["tensor"]
    yield handles
    for handle in handles.values():
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
    says = f"aux: expected a relu_aux or gelu_aux, {held} is a tensor"
    refused_header(wire, path, header, raw(DY), code="conflict", operand="aux", says=says)
    refused(
        wire,
        lambda: wire.request("GET", f"{TENSORS}/{held}/mask"),
        "conflict",
        None,
        f"expected a relu_aux, {held} is a tensor",
    )


def test_a_mask_where_numbers_are_due(wire: Wire, auxes: dict[str, str]) -> None:
    path, header = PLACES["x"](auxes["relu_aux"])
    says = "x: expected dtype float64 or float32 or float16 or bfloat16, the tensor has uint8"
    refused_header(wire, path, header, raw(DY), code="invalid_operands", operand="x", says=says)


@pytest.mark.parametrize("kind", ["relu_aux", "gelu_aux"])
@pytest.mark.parametrize(
    ("batch", "outputs", "looks"),
    [(3, 4, "of 4 rows and 3 columns"), (1, 4, "of 4 rows and 1 columns"), (2, 200, "of 200 rows")],
)
def test_an_aux_of_another_shape(
    wire: Wire, auxes: dict[str, str], kind: str, batch: int, outputs: int, looks: str
) -> None:
    dy = np.ones((batch, outputs), np.float32)
    header = {"dy": tensor(dy, 0), "aux": {"tensor": auxes[kind]}}
    says = f"aux: expected shape ... ({kind} {looks} ... got ("
    refused_header(
        wire, BACKWARD, header, raw(dy), code="invalid_operands", operand="aux", says=says
    )


@pytest.mark.parametrize("kind", ["relu_aux", "gelu_aux"])
def test_an_aux_of_other_rows_within_the_same_padding(
    wire: Wire, auxes: dict[str, str], kind: str
) -> None:
    dy = np.ones((2, 5), np.float32)
    header = {"dy": tensor(dy, 0), "aux": {"tensor": auxes[kind]}}
    says = "aux: expected the aux of 5 rows, it has 4"
    refused_header(
        wire, BACKWARD, header, raw(dy), code="invalid_operands", operand="aux", says=says
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "aux: expected a relu_aux or gelu_aux, got kind none"),
        ({"kind": "tensor"}, "aux: expected a relu_aux or gelu_aux, got kind tensor"),
        ({"kind": "gelu_aux"}, "aux: expected dtype float64 or ... got 'uint8'"),
        ({"kind": "relu_aux", "dtype": "float32"}, "aux: expected dtype uint8, got 'float32'"),
        ({"kind": "relu_aux", "shape": [2, 16]}, "aux: expected shape (16, 2) (relu_aux of 4 rows"),
        ({"kind": "relu_aux", "shape": [32]}, "aux: expected shape (16, 2) ... got (32,)"),
    ],
)
def test_an_aux_in_the_body_of_another_kind_or_shape(
    wire: Wire, given: dict[str, Any], says: str
) -> None:
    mask = raw(pack_mask(np.ones((4, 2), np.bool_)))
    aux = {"dtype": "uint8", "shape": [16, 2], "payload": 1, **given}
    header = {"dy": tensor(DY, 0), "aux": aux}
    refused_header(
        wire,
        BACKWARD,
        header,
        raw(DY),
        mask,
        code="invalid_operands",
        operand="aux",
        says=says,
    )


def test_an_aux_that_is_said_to_be_of_another_kind(wire: Wire, auxes: dict[str, str]) -> None:
    header = {"dy": tensor(DY, 0), "aux": {"tensor": auxes["relu_aux"], "kind": "gelu_aux"}}
    says = "aux: expected kind relu_aux, which the tensor has, got gelu_aux"
    refused_header(
        wire, BACKWARD, header, raw(DY), code="invalid_operands", operand="aux", says=says
    )


@pytest.mark.parametrize(
    ("epilog", "field", "kind", "code", "says"),
    [
        (
            "DRELU",
            "relu_aux",
            "gelu_aux",
            "invalid_operands",
            "dtype uint8, the tensor has float32",
        ),
        ("DGELU", "gelu_aux", "relu_aux", "invalid_operands", "the tensor has uint8"),
        ("DRELU", "gelu_aux", "gelu_aux", "malformed", "expected relu_aux with epilog DRELU"),
        ("RELU", "relu_aux", "relu_aux", "malformed", "expected no relu_aux with epilog RELU"),
    ],
)
def test_an_aux_of_another_epilog(
    wire: Wire, auxes: dict[str, str], epilog: str, field: str, kind: str, code: str, says: str
) -> None:
    b = np.ones((4, 2), np.float32)
    header = {
        "a": tensor(np.ones((4, 4), np.float32), 0),
        "b": tensor(b, 1),
        "epilog": epilog,
        field: {"tensor": auxes[kind]},
    }
    operand = "relu_aux" if epilog == "DRELU" else field
    refused_header(wire, MATMUL, header, bytes(64), raw(b), code=code, operand=operand, says=says)


def test_an_aux_of_another_layer(wire: Wire) -> None:
    weights = [wire.hold(WEIGHT) for _ in range(2)]
    header = {"x": tensor(X, 0), "weight": {"tensor": weights[0]}, "activation": "relu"}
    answer = wire.send(FORWARD, {**header, "save_aux": True}, BODY[0])
    aux = answer.header["aux"]["tensor"]
    given = {"dy": tensor(DY, 0), "aux": {"tensor": aux}, "weight": {"tensor": weights[1]}}
    says = f"aux: expected the aux of the layer of weight {weights[1]}, it is that of {weights[0]}"
    refused_header(wire, BACKWARD, given, raw(DY), code="conflict", operand="aux", says=says)
    given["weight"] = {"tensor": weights[0]}
    assert wire.send(BACKWARD, given, raw(DY)).status == 200
    for handle in (*weights, aux):
        wire.request("DELETE", f"{TENSORS}/{handle}")
