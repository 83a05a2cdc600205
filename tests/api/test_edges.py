"""Empty batches give empty results and zero gradients; NaN and infinity go through as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..local import Answer, Wire, raw, tensor
from ..reference import ACTIVATIONS, DTYPES, Host
from .refusals import BACKWARD, FORWARD, MATMUL, MLP_BACKWARD, MLP_FORWARD, TENSORS

NAN, INF = float("nan"), float("inf")


def send(wire: Wire, path: str, header: dict[str, Any], *arrays: Host) -> Answer:
    answer = wire.send(path, header, *map(raw, arrays))
    assert answer.status == 200, answer.header
    return answer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(0,), (3, 0), (0, 2)])
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
def test_an_empty_batch(wire: Wire, dtype: str, lead: tuple[int, ...], activation: str) -> None:
    x, weight, bias = (np.ones(s, DTYPES[dtype]) for s in ((*lead, 3), (4, 3), (4,)))
    header = {
        "x": tensor(x, 0),
        "weight": tensor(weight, 1),
        "bias": tensor(bias, 2),
        "activation": activation,
        "save_aux": activation != "none",
    }
    answer = send(wire, FORWARD, header, x, weight, bias)
    assert answer.array("y").shape == (*lead, 4)
    dy = np.ones((*lead, 4), DTYPES[dtype])
    given = {"x": tensor(x, 1), "weight": tensor(weight, 2)}
    if activation == "none":
        given["dz"] = tensor(dy, 0)
    else:
        given |= {"dy": tensor(dy, 0), "aux": {"tensor": answer.header["aux"]["tensor"]}}
    gradients = send(wire, BACKWARD, given, dy, x, weight)
    assert gradients.array("dx").shape == (*lead, 3)
    assert np.array_equal(gradients.array("dweight"), np.zeros((4, 3)))
    assert np.array_equal(gradients.array("dbias"), np.zeros(4))
    if activation != "none":
        wire.request("DELETE", f"{TENSORS}/{answer.header['aux']['tensor']}")


def test_an_empty_batch_accumulates_nothing(wire: Wire) -> None:
    x, dz = np.ones((0, 3), np.float32), np.ones((0, 4), np.float32)
    held = np.arange(12, dtype=np.float32).reshape(4, 3)
    handle = wire.hold(held)
    outputs = {"dweight": {"tensor": handle, "alpha": 5.0, "beta": 2.0}}
    header = {"x": tensor(x, 0), "dz": tensor(dz, 1), "outputs": outputs}
    send(wire, BACKWARD, header, x, dz)
    read = wire.request(
        "GET", f"{TENSORS}/{handle}", headers={"Accept": "application/octet-stream"}
    )
    assert read.body == raw(2 * held)
    wire.request("DELETE", f"{TENSORS}/{handle}")


def test_an_empty_batch_through_a_stack(wire: Wire) -> None:
    x, weight = np.ones((2, 0, 3), np.float32), np.ones((3, 3), np.float32)
    layers = [{"weight": tensor(weight, 1), "bias": tensor(weight[0], 2), "activation": "relu"}] * 2
    header = {"x": tensor(x, 0), "layers": layers, "save_tape": True}
    answer = send(wire, MLP_FORWARD, header, x, weight, weight[0])
    assert answer.array("y").shape == (2, 0, 3)
    back = {"tape": answer.header["tape"]["tensor"], "dy": tensor(x, 0), "wants": ["dx", "dweight"]}
    reply = send(wire, MLP_BACKWARD, back, x)
    assert reply.array("dx").shape == (2, 0, 3)
    for layer in reply.header["layers"]:
        assert reply.payloads[layer["dweight"]["payload"]] == bytes(36)


@pytest.mark.parametrize("epilog", [None, "BIAS", "RELU_AUX", "BGRADA", "BGRADB"])
def test_no_products_at_all(wire: Wire, epilog: str | None) -> None:
    a, b, bias = (np.ones(s, np.float32) for s in ((0, 2, 3), (0, 3, 4), (2,)))
    header: dict[str, Any] = {"a": tensor(a, 0), "b": tensor(b, 1), "epilog": epilog}
    if epilog == "BIAS":
        header["bias"] = tensor(bias, 2)
    answer = send(wire, MATMUL, header, *([a, b, bias] if epilog == "BIAS" else [a, b]))
    assert answer.array("d").shape == (0, 2, 4)
    extents = {"BGRADA": [0, 2, 1], "BGRADB": [0, 4, 1], "RELU_AUX": [0, 16, 4]}
    if epilog in extents:
        assert answer.header[epilog.lower()]["shape"] == extents[epilog]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_in_a_product(wire: Wire, dtype: str) -> None:
    """Row by row: each number goes where IEEE arithmetic takes it, and no further."""
    x, weight = np.ones((5, 16), DTYPES[dtype]), np.ones((8, 16), DTYPES[dtype])
    x[1, 3], x[2, 3], x[3, 3], x[4, 3:5] = NAN, INF, -INF, (INF, -INF)
    header = {"x": tensor(x, 0), "weight": tensor(weight, 1)}
    y = send(wire, FORWARD, header, x, weight).array("y").astype(np.float64)
    expected = np.repeat([[16.0], [NAN], [INF], [-INF], [NAN]], 8, axis=1)
    assert np.array_equal(y, expected, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_in_an_activation(wire: Wire, activation: str) -> None:
    """ReLU of NaN is NaN, or 0 by some of the kernels of cuBLASLt: docs/protocol.md, NaN."""
    x, weight = np.eye(16, dtype=np.float32)[:4], np.zeros((8, 16), np.float32)
    bias = np.array([NAN, INF, -INF, 1, 0, -1, 2, -2], np.float32)
    header = {
        "x": tensor(x, 0),
        "weight": tensor(weight, 1),
        "bias": tensor(bias, 2),
        "activation": activation,
    }
    y = send(wire, FORWARD, header, x, weight, bias).array("y")
    assert (np.isnan(y[:, 0]) | ((y[:, 0] == 0) & (activation == "relu"))).all()
    assert np.isposinf(y[:, 1]).all()
    if activation == "relu":
        assert np.array_equal(y[:, 2:], np.tile([0, 1, 0, 0, 2, 0], (4, 1)))
    elif activation == "leaky_relu":
        assert np.isneginf(y[:, 2]).all()
    else:
        assert np.isnan(y[:, 2]).all()
        assert np.isfinite(y[:, 3:]).all()


def test_nan_and_infinity_in_gradients(wire: Wire) -> None:
    dz, x = np.zeros((16, 4), np.float32), np.ones((16, 8), np.float32)
    dz[0] = NAN, INF, -INF, 1
    answer = send(wire, BACKWARD, {"dz": tensor(dz, 0), "x": tensor(x, 1)}, dz, x)
    assert np.array_equal(answer.array("dbias"), dz[0], equal_nan=True)
    expected = np.repeat(dz[0][:, None], 8, axis=1)
    assert np.array_equal(answer.array("dweight"), expected, equal_nan=True)


@pytest.mark.parametrize(("alpha", "expected"), [(NAN, NAN), (INF, INF), (-INF, -INF), (0, 0)])
def test_nan_and_infinity_in_a_scale(wire: Wire, alpha: float, expected: float) -> None:
    x, weight = np.ones((4, 16), np.float32), np.ones((8, 16), np.float32)
    header = {"x": tensor(x, 0), "weight": tensor(weight, 1), "alpha": alpha}
    y = send(wire, FORWARD, header, x, weight).array("y")
    assert np.array_equal(y, np.full((4, 8), expected), equal_nan=True)


def test_beta_of_zero_does_not_spread_what_was_there(wire: Wire) -> None:
    """As BLAS has it: with beta 0 the old contents are not read."""
    handle = wire.hold(np.full((8, 16), NAN, np.float32))
    dz, x = np.ones((4, 8), np.float32), np.ones((4, 16), np.float32)
    outputs = {"dweight": {"tensor": handle, "alpha": 0.5, "beta": 0.0}}
    header = {"dz": tensor(dz, 0), "x": tensor(x, 1), "outputs": outputs}
    send(wire, BACKWARD, header, dz, x)
    read = wire.request(
        "GET", f"{TENSORS}/{handle}", headers={"Accept": "application/octet-stream"}
    )
    assert read.body == raw(np.full((8, 16), 2, np.float32))
    wire.request("DELETE", f"{TENSORS}/{handle}")
