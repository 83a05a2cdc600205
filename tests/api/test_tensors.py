"""Tensors that the service holds: made, read, described, replaced and freed, in every form."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ..local import MSGPACK, Answer, Wire, raw, tensor
from ..reference import DTYPES, Host, random
from .refusals import JSON, OCTETS, TENSORS, footprint, refused_header

RNG = np.random.default_rng(7)


def read(wire: Wire, handle: str) -> bytes:
    answer = wire.request("GET", f"{TENSORS}/{handle}", headers={"Accept": OCTETS})
    assert answer.status == 200
    return answer.body


@pytest.fixture
def handles(wire: Wire) -> Iterator[list[str]]:
    """Handles to be freed in the end."""
    handles: list[str] = []
    yield handles
    for handle in handles:
        assert wire.request("DELETE", f"{TENSORS}/{handle}").status == 204


def created(answer: Answer, handles: list[str]) -> dict[str, Any]:
    assert answer.status == 201, answer
    handles.append(answer.header["tensor"])
    return answer.header


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 3), (0, 3), (1,) * 8])
def test_in_and_out_in_every_form(
    wire: Wire, handles: list[str], dtype: str, shape: tuple[int, ...]
) -> None:
    array = random(RNG, shape, dtype)
    data = raw(array)
    described = {"dtype": dtype, "shape": list(shape)}
    value = {**described, "data": base64.b64encode(data).decode()}
    query = f"{TENSORS}?dtype={dtype}&shape={','.join(map(str, shape))}"
    for answer in (
        wire.send(TENSORS, {"value": {**described, "payload": 0}}, data),
        wire.request(
            "POST", TENSORS, json.dumps({"value": value}).encode(), {"Content-Type": JSON}
        ),
        wire.request("POST", query, data, {"Content-Type": OCTETS}),
    ):
        metadata = created(answer, handles)
        assert metadata.items() >= {**described, "nbytes": len(data), "kind": "tensor"}.items()
        assert (metadata["version"], metadata["pinned"], "strides" in metadata) == (1, False, False)
        path = f"{TENSORS}/{metadata['tensor']}"
        packed = wire.request("GET", path, headers={"Accept": MSGPACK})
        assert packed.header == {"value": {**described, "payload": 0}}
        assert packed.payloads == [data]
        assert wire.get(path) == {"value": value}
        octets = wire.request("GET", path, headers={"Accept": OCTETS})
        assert octets.body == data
        assert octets.headers["content-type"] == OCTETS
        assert octets.headers["x-tensor-dtype"] == dtype
        assert octets.headers["x-tensor-shape"] == ",".join(map(str, shape))
        assert octets.headers["content-length"] == str(len(data))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(wire: Wire, handles: list[str], dtype: str) -> None:
    metadata = created(wire.send(TENSORS, {"dtype": dtype, "shape": [4, 1000]}), handles)
    assert read(wire, metadata["tensor"]) == bytes(4000 * DTYPES[dtype].itemsize)


def test_a_strided_value_becomes_row_major(wire: Wire, handles: list[str]) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = tensor(array, 0, strides=[1, 2])
    metadata = created(wire.send(TENSORS, {"value": value}, array.tobytes("F")), handles)
    assert "strides" not in metadata
    assert read(wire, metadata["tensor"]) == raw(array)


@pytest.mark.parametrize("size", [1, 4 << 20, (9 << 20) + 4])
def test_a_raw_body_in_chunks(wire: Wire, handles: list[str], size: int) -> None:
    """Several MiB, in pieces that end anywhere; read back in pieces too."""
    data = RNG.bytes(4 * -(-size // 4))
    steps = [data[at : at + 70_001] for at in range(0, len(data), 70_001)]
    query = f"{TENSORS}?dtype=float32&shape={len(data) // 4}"
    headers = {"Content-Type": OCTETS, "Content-Length": str(len(data))}
    handle = created(wire.request("POST", query, iter(steps), headers), handles)["tensor"]
    assert read(wire, handle) == data
    answer = wire.request("PUT", f"{TENSORS}/{handle}", iter(steps[::-1]), headers)
    assert (answer.status, answer.header["version"]) == (200, 2)
    assert read(wire, handle) == b"".join(steps[::-1])


@pytest.mark.parametrize("pinned", [False, True])
def test_how_long_is_said_at_the_start(wire: Wire, handles: list[str], pinned: bool) -> None:
    word = str(pinned).lower()
    query = f"{TENSORS}?dtype=float32&shape=1&pinned={word}&ttl_s=2.5e2"
    header = {"dtype": "float32", "shape": [1], "pinned": pinned, "ttl_s": 250}
    for answer in (
        wire.send(TENSORS, header),
        wire.request("POST", query, bytes(4), {"Content-Type": OCTETS}),
    ):
        metadata = created(answer, handles)
        assert (metadata["pinned"], metadata["ttl_s"]) == (pinned, 250)
        remaining = metadata["expires_in_s"]
        assert remaining is None if pinned else 240 < remaining <= 250


def test_metadata_and_list(wire: Wire, handles: list[str]) -> None:
    before = {entry["tensor"] for entry in wire.get(TENSORS)["tensors"]}
    for extent in (1, 2, 3):
        created(wire.send(TENSORS, {"dtype": "float64", "shape": [extent]}), handles)
    listed = [entry for entry in wire.get(TENSORS)["tensors"] if entry["tensor"] not in before]
    assert [entry["tensor"] for entry in listed] == handles
    for extent, entry in enumerate(listed, 1):
        shown = wire.get(f"{TENSORS}/{entry['tensor']}/metadata")
        assert shown.pop("expires_in_s") >= entry.pop("expires_in_s") - 1
        assert shown == entry
        assert (entry["shape"], entry["nbytes"]) == ([extent], 8 * extent)


def test_freed_once(wire: Wire) -> None:
    before = footprint(wire)
    handle = wire.hold(np.zeros((100, 100), np.float32))
    assert footprint(wire)["bytes"] == before["bytes"] + 40_000
    answer = wire.request("DELETE", f"{TENSORS}/{handle}")
    assert (answer.status, answer.body) == (204, b"")
    assert wire.request("DELETE", f"{TENSORS}/{handle}").status == 410
    assert footprint(wire)["tensors"] == before["tensors"]
    assert footprint(wire)["bytes"] == before["bytes"]


def test_replaced(wire: Wire, handles: list[str]) -> None:
    arrays = [random(RNG, (3, 4), "float32") for _ in range(4)]
    handle = wire.hold(arrays[0])
    handles.append(handle)
    path = f"{TENSORS}/{handle}"
    answer = wire.send(path, {"value": tensor(arrays[1], 0)}, raw(arrays[1]), method="PUT")
    assert (answer.status, answer.header["version"]) == (200, 2)
    assert read(wire, handle) == raw(arrays[1])
    answer = wire.request("PUT", path, raw(arrays[2]), {"Content-Type": OCTETS})
    assert (answer.status, answer.header["version"]) == (200, 3)
    assert read(wire, handle) == raw(arrays[2])
    columns = arrays[3].tobytes("F")
    value = tensor(arrays[3], 0, strides=[1, 3])
    assert wire.send(path, {"value": value}, columns, method="PUT").header["version"] == 4
    assert read(wire, handle) == raw(arrays[3])
    assert "strides" not in wire.get(f"{path}/metadata")


OTHERS = [
    (np.zeros((4, 3), np.float32), "tensor [3, 4] of float32, got tensor [4, 3] of float32"),
    (np.zeros((12,), np.float32), "got tensor [12] of float32"),
    (np.zeros((3, 4), np.float64), "got tensor [3, 4] of float64"),
]


@pytest.mark.parametrize(("array", "says"), OTHERS)
def test_replaced_by_something_else(wire: Wire, handles: list[str], array: Host, says: str) -> None:
    held = random(RNG, (3, 4), "float32")
    handles.append(wire.hold(held))
    refused_header(
        wire,
        f"{TENSORS}/{handles[0]}",
        {"value": tensor(array, 0)},
        raw(array),
        code="invalid_operands",
        operand="value",
        says=f"value: expected ... {says}",
        method="PUT",
    )
    path = f"{TENSORS}/{handles[0]}"
    answer = wire.request("PUT", path, bytes(44), {"Content-Type": OCTETS})
    assert (answer.status, answer.header["code"]) == (400, "malformed")
    assert "expected a body of 48 bytes, Content-Length is 44" in answer.header["detail"]
    assert read(wire, handles[0]) == raw(held)
    assert wire.get(f"{path}/metadata")["version"] == 1


@pytest.mark.parametrize("handle", [True, False])
def test_values_that_are_none(wire: Wire, handles: list[str], handle: bool) -> None:
    """A handle, from which nothing is copied; both forms at once."""
    handles.append(wire.hold(np.zeros(2, np.float32)))
    if handle:
        header: dict[str, Any] = {"value": {"tensor": handles[0]}}
        says = "value: expected a payload or data, got a handle"
    else:
        header = {"value": tensor(np.zeros(1, np.float32), 0), "dtype": "float32"}
        says = "value: expected either value, or dtype and shape"
    payloads = [] if handle else [bytes(4)]
    refused_header(wire, TENSORS, header, *payloads, code="malformed", operand="value", says=says)
