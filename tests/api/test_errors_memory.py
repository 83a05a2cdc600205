"""Quota and device memory exhausted: 507, and nothing that was there is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..local import Answer, UnixConnection, Wire, raw, running, tensor
from .refusals import (
    BACKWARD,
    BODY,
    FORWARD,
    MATMUL,
    MLP_BACKWARD,
    MLP_FORWARD,
    OCTETS,
    TENSORS,
    WARM,
    X,
    forward,
    refused,
    refused_header,
    unchanged,
    works,
)

QUOTA = 1000
DEVICE = 1 << 20


@pytest.fixture
def frugal(tmp_path: Path) -> Iterator[Wire]:
    """A service with a quota of 1000 bytes, 24 of which are used."""
    with (
        running(tmp_path / "s", device="cpu", tenant_bytes=QUOTA),
        closing(Wire(tmp_path / "s")) as wire,
    ):
        handle = wire.hold(X)
        yield wire
        assert wire.request("GET", f"{TENSORS}/{handle}", headers={"Accept": OCTETS}).body == raw(X)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Wire]:
    """A service with 1 MiB for arrays, 24 bytes of which are used, and any quota."""
    settings: dict[str, Any] = {
        "memory_limit": DEVICE,
        "tenant_bytes": 1 << 40,
        "recording_bytes": 0,
    }
    with running(tmp_path / "s", device="cpu", **settings), closing(Wire(tmp_path / "s")) as wire:
        handle = wire.hold(X)
        yield wire
        assert wire.request("GET", f"{TENSORS}/{handle}", headers={"Accept": OCTETS}).body == raw(X)


def exhausted(wire: Wire, path: str, header: dict[str, Any], *payloads: bytes, says: str) -> None:
    refused_header(wire, path, header, *payloads, code="out_of_memory", says=says)


def test_the_quota_of_tensors(frugal: Wire) -> None:
    says = "1024 bytes are needed, 24 of the tenant's quota of 1000 are used"
    value = tensor(np.zeros(256, np.float32), 0)
    exhausted(frugal, TENSORS, {"value": value}, bytes(1024), says=says)
    exhausted(frugal, TENSORS, {"dtype": "float32", "shape": [256]}, says=says)

    def upload() -> Answer:
        path = f"{TENSORS}?dtype=float32&shape=256"
        return frugal.request("POST", path, bytes(1024), {"Content-Type": OCTETS})

    refused(frugal, upload, "out_of_memory", None, says)


def test_the_quota_is_looked_at_before_a_raw_body_is_read(frugal: Wire, tmp_path: Path) -> None:
    with unchanged(frugal):
        connection = UnixConnection(str(tmp_path / "s"))
        connection.putrequest("POST", f"{TENSORS}?dtype=float32&shape={1 << 40}")
        connection.putheader("Content-Type", OCTETS)
        connection.putheader("Content-Length", str(4 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 507
        connection.close()
    assert works(frugal)


def test_the_last_byte_of_the_quota_can_be_used(frugal: Wire) -> None:
    header = {"dtype": "float32", "shape": [(QUOTA - 24) // 4]}
    handle = frugal.send(TENSORS, header).header["tensor"]
    says = "2 bytes are needed, 1000 of the tenant's quota of 1000 are used"
    exhausted(frugal, TENSORS, {"dtype": "float16", "shape": [1]}, says=says)
    assert frugal.send(TENSORS, {"dtype": "float16", "shape": [0]}).status == 201
    assert frugal.request("DELETE", f"{TENSORS}/{handle}").status == 204
    assert frugal.send(TENSORS, header).status == 201


WIDE = np.ones((125, 3), np.float32)
"""A weight whose outputs for a batch of 2 take exactly the quota."""


@pytest.mark.parametrize(
    ("outputs", "save_aux", "needed"),
    [
        ({"y": "tensor"}, False, 1000),
        ({"y": "tensor"}, True, 1032),
        ({"y": "tensor", "aux": "payload"}, True, 1000),
    ],
)
def test_the_quota_of_results(
    frugal: Wire, outputs: dict[str, Any], save_aux: bool, needed: int
) -> None:
    header = forward(weight=tensor(WIDE, 1), activation="relu", save_aux=save_aux, outputs=outputs)
    says = f"{needed} bytes are needed, 24 of the tenant's quota of 1000 are used"
    exhausted(frugal, FORWARD, header, BODY[0], raw(WIDE), says=says)


def test_the_quota_of_a_tape(frugal: Wire) -> None:
    """The input, the weight (which nothing else holds) and the aux."""
    layers = [{"weight": tensor(WIDE, 1), "activation": "gelu"}]
    header = {"x": tensor(X, 0), "layers": layers, "save_tape": True, "outputs": {"y": "tensor"}}
    needed = X.nbytes + WIDE.nbytes + 2 * 128 * 4 + 2 * 125 * 4
    says = f"{needed} bytes are needed, 24 of the tenant's quota of 1000 are used"
    exhausted(frugal, MLP_FORWARD, header, BODY[0], raw(WIDE), says=says)


def test_replacing_needs_no_quota(frugal: Wire) -> None:
    full = np.zeros((QUOTA - 24) // 4, np.float32)
    handle = frugal.hold(full)
    header = {"value": tensor(full, 0)}
    assert frugal.send(f"{TENSORS}/{handle}", header, raw(full), method="PUT").status == 200


def test_device_memory_for_tensors(small: Wire) -> None:
    x = np.zeros((1 << 17, 3), np.float32)
    says = f"{x.nbytes} bytes are needed, {DEVICE - 24} of {DEVICE} are free"
    exhausted(small, TENSORS, {"value": tensor(x, 0)}, raw(x), says=says)
    exhausted(small, TENSORS, {"dtype": "float32", "shape": [1 << 17, 3]}, says=says)

    def upload() -> Answer:
        path = f"{TENSORS}?dtype=float32&shape={1 << 17},3"
        return small.request("POST", path, raw(x), {"Content-Type": OCTETS})

    refused(small, upload, "out_of_memory", None, says)


COLUMN = np.zeros((1 << 12, 1), np.float32)


@pytest.mark.parametrize(
    ("path", "header"),
    [
        (FORWARD, {"x": tensor(COLUMN, 0), "weight": tensor(COLUMN, 0)}),
        (BACKWARD, {"dz": tensor(COLUMN.T, 0), "x": tensor(COLUMN.T, 0)}),
        (MATMUL, {"a": tensor(COLUMN, 0), "b": tensor(COLUMN.T, 0)}),
        (
            MLP_FORWARD,
            {
                "x": tensor(COLUMN, 0),
                "layers": [
                    {"weight": tensor(COLUMN[:3], 1), "activation": "relu"},
                    {"weight": tensor(COLUMN.reshape(-1, 4)[:, :3], 2)},
                ],
                "save_tape": True,
            },
        ),
    ],
)
def test_device_memory_for_results(small: Wire, path: str, header: dict[str, Any]) -> None:
    payloads = [raw(COLUMN), raw(COLUMN[:3]), raw(COLUMN.reshape(-1, 4)[:, :3])]
    used = str(header).count("'payload'")
    says = f"bytes are needed ... of {DEVICE} are free"
    exhausted(small, path, header, *payloads[: 1 if path != MLP_FORWARD else used], says=says)


def test_device_memory_for_a_rehearsal(small: Wire) -> None:
    described = {"dtype": "float32", "shape": [1 << 12, 1]}
    request = {"operation": "linear/forward", "header": {"x": described, "weight": described}}
    exhausted(small, WARM, {"requests": [request]}, says="bytes are needed")


def test_a_step_that_runs_out_of_memory_changes_no_weight(small: Wire) -> None:
    """The first layer's update is computed, the second's finds no memory: neither is made."""
    weights = [np.ones((60, 300), np.float32), np.ones((300, 300), np.float32)]
    x = np.ones((4, 300), np.float32)
    handles = [small.hold(weight) for weight in weights]
    layers = [{"weight": {"tensor": handle}} for handle in reversed(handles)]
    header = {"x": tensor(x, 0), "layers": layers, "save_tape": True}
    tape = small.send(MLP_FORWARD, header, raw(x)).header["tape"]["tensor"]
    filler = small.send(TENSORS, {"dtype": "float32", "shape": [64_000]}).header["tensor"]
    dy = np.ones((4, 60), np.float32)
    steps = [{"dweight": {"tensor": handle, "alpha": -0.5, "beta": 1.0}} for handle in handles]
    backward = {"tape": tape, "dy": tensor(dy, 0), "layers": steps[::-1]}
    exhausted(small, MLP_BACKWARD, backward, raw(dy), says="360000 bytes are needed")
    for handle, weight in zip(handles, weights, strict=True):
        assert small.get(f"{TENSORS}/{handle}/metadata")["version"] == 1
        held = small.request("GET", f"{TENSORS}/{handle}", headers={"Accept": OCTETS})
        assert held.body == raw(weight)
    small.request("DELETE", f"{TENSORS}/{filler}")
    assert small.send(MLP_BACKWARD, backward, raw(dy)).status == 200, "the tape was kept"
    assert small.get(f"{TENSORS}/{handles[1]}/metadata")["version"] == 2


def test_memory_of_a_freed_tensor_can_be_had_again(small: Wire) -> None:
    for _ in range(20):
        answer = small.send(TENSORS, {"dtype": "float32", "shape": [200_000]})
        assert answer.status == 201
        assert small.request("DELETE", f"{TENSORS}/{answer.header['tensor']}").status == 204


def test_a_product_takes_no_more_memory_than_is_allowed(tmp_path: Path) -> None:
    """Result, aux and the plan's scratch space are all that is as large as the result."""
    script = f"""
import resource, sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import ml_dtypes, numpy as np
from matmuld_client import Client
from tests.local import running
path = Path({str(tmp_path / "s")!r})
with running(path, device="cpu", memory_limit=1 << 30), Client(f"unix:{{path}}") as client:
    x = np.ones((8, 8), ml_dtypes.bfloat16)
    client.linear(x, x, activation="gelu", save_aux=True, out="tensor")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = np.ones((9000, 1), ml_dtypes.bfloat16)
    client.linear(x, x, activation="gelu", save_aux=True, out="tensor")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100
    )
    held = 2 * 9000 * 9000 * 2 + 9000 * 9000 * 4
    assert int(result.stdout) * 1024 < held + (400 << 20)
