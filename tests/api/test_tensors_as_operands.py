"""Tensors at work: views as operands, auxiliary data read, unpacked and brought back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ..local import Wire, decoded, raw, tensor
from ..reference import (
    ACTIVATIONS,
    Host,
    activation_prime,
    assert_close,
    f64,
    pack_mask,
    pre_activation_aux,
    random,
)
from .refusals import BACKWARD, FORWARD, MATMUL, MLP_FORWARD, OCTETS, TENSORS, refused_header

RNG = np.random.default_rng(11)


def small_integers(*shape: int) -> Host:
    return RNG.integers(-4, 5, shape).astype(np.float32)


@pytest.fixture
def handles(wire: Wire) -> Iterator[list[str]]:
    """Handles to be freed in the end."""
    handles: list[str] = []
    yield handles
    for handle in handles:
        assert wire.request("DELETE", f"{TENSORS}/{handle}").status == 204


BASE = small_integers(6, 8)
FLAT = BASE.reshape(-1)


VIEWS: list[tuple[dict[str, Any], Host]] = [
    ({"shape": [2, 8], "offset": 16}, BASE[2:4]),
    ({"shape": [6, 3], "strides": [8, 1], "offset": 5}, BASE[:, 5:]),
    ({"shape": [8, 6], "strides": [1, 8]}, BASE.T),
    ({"strides": [8, 1]}, BASE),
    ({"shape": [3, 8], "strides": [16, 1], "offset": 8}, BASE[1::2]),
    ({"shape": [6, 4], "strides": [8, 2], "offset": 1}, BASE[:, 1::2]),
    ({"shape": [2, 3, 8], "strides": [24, 8, 1]}, BASE.reshape(2, 3, 8)),
    ({"shape": [3, 6, 2], "strides": [2, 8, 1]}, BASE.reshape(6, 4, 2)[:, :3].swapaxes(0, 1)),
    ({"shape": [4, 12], "strides": [12, 1]}, FLAT.reshape(4, 12)),
    ({"shape": [1, 1], "offset": 47}, FLAT[47:].reshape(1, 1)),
    ({"shape": [0, 8], "offset": 48}, BASE[:0]),
    ({"shape": [8], "offset": 40}, BASE[5]),
]
MATRICES = [(view, elements) for view, elements in VIEWS if elements.ndim > 1 and elements.size]


@pytest.fixture
def base(wire: Wire, handles: list[str]) -> str:
    """`BASE`, held."""
    handles.append(wire.hold(BASE))
    return handles[-1]


@pytest.mark.parametrize(("view", "elements"), VIEWS)
def test_a_view_as_x(wire: Wire, base: str, view: dict[str, Any], elements: Host) -> None:
    weight = small_integers(5, elements.shape[-1])
    header = {"x": {"tensor": base, **view}, "weight": tensor(weight, 0)}
    y = wire.send(FORWARD, header, raw(weight)).array("y")
    assert np.array_equal(y, elements @ weight.T)


@pytest.mark.parametrize(("view", "elements"), [case for case in MATRICES if case[1].ndim == 2])
def test_a_view_as_weight(wire: Wire, base: str, view: dict[str, Any], elements: Host) -> None:
    x = small_integers(5, elements.shape[-1])
    header = {"x": tensor(x, 0), "weight": {"tensor": base, **view}}
    y = wire.send(FORWARD, header, raw(x)).array("y")
    assert np.array_equal(y, x @ elements.T)


@pytest.mark.parametrize(("view", "elements"), MATRICES)
def test_a_view_as_a_matrix(wire: Wire, base: str, view: dict[str, Any], elements: Host) -> None:
    b = small_integers(elements.shape[-1], 5)
    header = {"a": {"tensor": base, **view}, "b": tensor(b, 0)}
    d = wire.send(MATMUL, header, raw(b)).array("d")
    assert np.array_equal(d, elements @ b)


@pytest.mark.parametrize(
    ("view", "elements"), [(view, elements) for view, elements in VIEWS if "offset" not in view]
)
def test_a_view_of_a_payload(
    wire: Wire, handles: list[str], view: dict[str, Any], elements: Host
) -> None:
    value = {"dtype": "float32", "shape": [6, 8], **view, "payload": 0}
    answer = wire.send(TENSORS, {"value": value}, raw(BASE))
    handles.append(answer.header["tensor"])
    answer = wire.request("GET", f"{TENSORS}/{handles[0]}", headers={"Accept": OCTETS})
    assert answer.body == raw(elements)


SHAPES = [(4, 2), (1, 1), (128, 3), (129, 5), (300, 1)]
"""Outputs and batch: within, at and over the padding of a mask."""


@pytest.mark.parametrize(("outputs", "batch"), SHAPES)
def test_a_mask_is_unpacked(wire: Wire, handles: list[str], outputs: int, batch: int) -> None:
    x, weight = small_integers(batch, 6), small_integers(outputs, 6)
    header = {"x": tensor(x, 0), "weight": tensor(weight, 1), "activation": "relu"}
    answer = wire.send(FORWARD, {**header, "save_aux": True}, raw(x), raw(weight))
    handles.append(answer.header["aux"]["tensor"])
    expected = x @ weight.T >= 0
    got = wire.request(
        "GET", f"{TENSORS}/{handles[0]}/mask", headers={"Accept": "application/msgpack"}
    )
    assert got.header == {"value": {"dtype": "bool", "shape": [batch, outputs], "payload": 0}}
    assert np.array_equal(decoded(got.header["value"], got.payloads), expected)


def test_masks_of_a_batch_of_products(wire: Wire, handles: list[str]) -> None:
    a, b = small_integers(3, 5, 4), small_integers(3, 4, 7)
    header = {"a": tensor(a, 0), "b": tensor(b, 1), "epilog": "RELU_AUX"}
    answer = wire.send(MATMUL, header, raw(a), raw(b))
    handles.append(answer.header["relu_aux"]["tensor"])
    value = wire.get(f"{TENSORS}/{handles[0]}/mask")["value"]
    assert (value["dtype"], value["shape"]) == ("bool", [3, 7, 5])
    mask = wire.request(
        "GET", f"{TENSORS}/{handles[0]}/mask", headers={"Accept": "application/msgpack"}
    )
    got = decoded(mask.header["value"], mask.payloads)
    assert np.array_equal(got, (a @ b >= 0).swapaxes(-1, -2))


@pytest.mark.parametrize(("outputs", "batch"), SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("order", ["C", "F"])
def test_aux_data_from_the_client(
    wire: Wire,
    handles: list[str],
    outputs: int,
    batch: int,
    activation: str,
    held: bool,
    order: Any,
) -> None:
    """Uploaded or in the body, in any order, it does what the service's own does."""
    kind = f"{activation}_aux"
    z, dy = random(RNG, (batch, outputs), "float32"), random(RNG, (batch, outputs), "float32")
    aux = pack_mask(z.T >= 0) if activation == "relu" else pre_activation_aux(z.T)
    rows, columns = aux.shape
    strides = [columns, 1] if order == "C" else [1, rows]
    given: dict[str, Any] = tensor(aux, 0, kind=kind, strides=strides)
    data = aux.tobytes(order)
    if held:
        answer = wire.send(TENSORS, {"value": given}, data)
        assert answer.status == 201, answer.header
        assert answer.header["kind"] == kind
        handles.append(answer.header["tensor"])
        answer = wire.send(BACKWARD, {"dy": tensor(dy, 0), "aux": {"tensor": handles[0]}}, raw(dy))
    else:
        header = {"dy": tensor(dy, 1), "aux": given}
        answer = wire.send(BACKWARD, header, data, raw(dy))
    dz = f64(dy) * activation_prime(activation, f64(z))
    scale = np.abs(f64(dy)).sum(0) + 1
    assert_close(answer.array("dbias"), dz.sum(0), scale, "float32", approximate=True)


def test_aux_data_comes_back_as_it_went(wire: Wire, handles: list[str]) -> None:
    aux = pack_mask(RNG.random((140, 3)) > 0.5)
    value = tensor(aux, 0, kind="relu_aux", strides=[1, 32])
    handles.append(wire.send(TENSORS, {"value": value}, aux.tobytes("F")).header["tensor"])
    path = f"{TENSORS}/{handles[0]}"
    octets = wire.request("GET", path, headers={"Accept": OCTETS})
    assert octets.body == aux.tobytes("C"), "raw bytes are row-major"
    assert (octets.headers["x-tensor-dtype"], octets.headers["x-tensor-shape"]) == ("uint8", "32,3")
    got = wire.request("GET", path, headers={"Accept": "application/msgpack"})
    assert got.header["value"]["strides"] == [1, 32]
    assert np.array_equal(decoded(got.header["value"], got.payloads), aux)
    mask = wire.request("GET", f"{path}/mask", headers={"Accept": "application/msgpack"})
    assert mask.header["value"]["shape"] == [3, 256], "the rows of an upload are all that it has"
    assert np.array_equal(
        decoded(mask.header["value"], mask.payloads)[:, :140], unpacked(aux)[:140].T
    )
    flipped = aux ^ 255
    answer = wire.send(path, {"value": value}, flipped.tobytes("F"), method="PUT")
    assert (answer.status, answer.header["version"]) == (200, 2)
    assert wire.request("GET", path, headers={"Accept": OCTETS}).body == flipped.tobytes("C")


def unpacked(aux: Host) -> Host:
    bits = np.unpackbits(aux, axis=0, bitorder="little")
    return bits.astype(np.bool_)


@pytest.mark.parametrize(
    ("dtype", "shape", "kind", "says"),
    [
        ("uint8", [16, 2], "tensor", "expected uint8 for relu_aux and only for it, got uint8"),
        ("uint8", [16, 2], "gelu_aux", "expected uint8 for relu_aux and only for it, got uint8"),
        ("float32", [16, 2], "relu_aux", "expected uint8 for relu_aux ... got float32"),
        ("uint8", [16], "relu_aux", "expected shape […, R, N] for relu_aux, got (16,)"),
        ("float32", [], "gelu_aux", "expected shape […, R, N] for gelu_aux, got ()"),
        ("bool", [4], "tensor", "expected dtype ... got 'bool'"),
    ],
)
def test_aux_data_that_is_none(
    wire: Wire, dtype: str, shape: list[int], kind: str, says: str
) -> None:
    value = {"dtype": dtype, "shape": shape, "kind": kind, "payload": 0}
    nbytes = int(np.prod(shape)) * {"float32": 4}.get(dtype, 1)
    refused_header(
        wire,
        TENSORS,
        {"value": value},
        bytes(nbytes),
        code="invalid_operands",
        operand="value",
        says=f"value: {says}",
    )


def test_results_by_handle_feed_the_next_product(wire: Wire, handles: list[str]) -> None:
    x, weight = small_integers(5, 4), small_integers(4, 4)
    header = {"x": tensor(x, 0), "weight": tensor(weight, 1), "outputs": {"y": "tensor"}}
    first = wire.send(FORWARD, header, raw(x), raw(weight)).header["y"]
    assert first == {
        "dtype": "float32",
        "shape": [5, 4],
        "tensor": first["tensor"],
        "kind": "tensor",
    }
    handles.append(first["tensor"])
    into = {"y": {"tensor": first["tensor"]}}
    header = {"x": first_operand(first), "weight": tensor(weight, 0), "outputs": into}
    second = wire.send(FORWARD, header, raw(weight))
    assert second.header["y"]["tensor"] == first["tensor"]
    assert wire.get(f"{TENSORS}/{handles[0]}/metadata")["version"] == 2
    answer = wire.request("GET", f"{TENSORS}/{handles[0]}", headers={"Accept": OCTETS})
    assert answer.body == raw(x @ weight.T @ weight.T)


def first_operand(result: dict[str, Any]) -> dict[str, Any]:
    """A result as it came is an operand, once its place in the reply is left out."""
    return {name: part for name, part in result.items() if name != "payload"}


def test_metadata_of_a_tape(wire: Wire, handles: list[str]) -> None:
    x, weight = small_integers(5, 4), small_integers(4, 4)
    layers = [{"weight": tensor(weight, 1), "activation": "relu"}] * 2
    header = {"x": tensor(x, 0), "layers": layers, "save_tape": True}
    tape = wire.send(MLP_FORWARD, header, raw(x), raw(weight)).header["tape"]
    handles.append(tape["tensor"])
    shown = wire.get(f"{TENSORS}/{tape['tensor']}/metadata")
    assert (shown["kind"], shown["layers"]) == ("tape", 2)
    assert not shown.keys() & {"dtype", "shape"}
    assert shown["nbytes"] == 2 * (x.nbytes + weight.nbytes + 16 * 5)
