"""Stacks of layers with tapes, against back-propagation in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matmuld_client import Accumulate, Client, Gone, Layer

from .. import reference
from ..reference import DTYPES, F64, Host, activate, activation_prime, f64

SIZES = (12, 17, 9, 5)
LOOSE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-2, "bfloat16": 1.5e-1}


def relative(got: object, expected: F64) -> float:
    """The error in the norm, relative."""
    assert isinstance(got, np.ndarray)
    assert got.shape == expected.shape
    return float(np.linalg.norm(f64(got) - expected) / (np.linalg.norm(expected) + 1e-300))


class Network:
    """Random weights, and what they do in float64."""

    def __init__(self, dtype: str, activations: Any, *, bias: bool = True) -> None:
        rng = np.random.default_rng(7)
        self.activations = activations
        self.weights = [
            (rng.standard_normal((o, i)) / np.sqrt(i)).astype(DTYPES[dtype])
            for i, o in pairwise(SIZES)
        ]
        self.biases = [reference.random(rng, (o,), dtype) if bias else None for o in SIZES[1:]]
        self.x = reference.random(rng, (16, SIZES[0]), dtype)
        self.dy = reference.random(rng, (16, SIZES[-1]), dtype)

    def layers(self) -> list[Layer]:
        return [
            Layer(w, b, a)
            for w, b, a in zip(self.weights, self.biases, self.activations, strict=True)
        ]

    def forward(self) -> tuple[list[F64], list[F64]]:
        """Inputs and pre-activations of every layer, and y as the last input."""
        inputs, zs = [f64(self.x)], []
        for weight, bias, name in zip(self.weights, self.biases, self.activations, strict=True):
            z = inputs[-1] @ f64(weight).T + (0.0 if bias is None else f64(bias))
            zs.append(z)
            inputs.append(activate(name, z))
        return inputs, zs

    def backward(self) -> tuple[F64, list[F64], list[F64]]:
        inputs, zs = self.forward()
        gradient = f64(self.dy)
        dweights, dbiases = [], []
        for index in (2, 1, 0):
            dz = gradient * activation_prime(self.activations[index], zs[index])
            dweights.append(dz.T @ inputs[index])
            dbiases.append(dz.sum(0))
            gradient = dz @ f64(self.weights[index])
        return gradient, dweights[::-1], dbiases[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activations",
    [
        ("relu", "relu", "none"),
        ("gelu", "none", "gelu"),
        ("none", "gelu", "relu"),
        ("gelu_erf", "silu", "leaky_relu"),
        ("leaky_relu", "gelu_erf", "silu"),
    ],
)
def test_a_stack_and_its_gradients(client: Client, dtype: str, activations: Any) -> None:
    net = Network(dtype, activations)
    y, tape = client.mlp(net.x, net.layers(), save_tape=True)
    assert relative(y, net.forward()[0][-1]) < LOOSE[dtype]
    got = client.mlp_backward(tape, dy=net.dy, wants=["dx", "dweight", "dbias"])
    dx, dweights, dbiases = net.backward()
    assert relative(got.dx, dx) < LOOSE[dtype]
    for layer, dweight, dbias in zip(got.layers, dweights, dbiases, strict=True):
        assert relative(layer.dweight, dweight) < LOOSE[dtype]
        assert relative(layer.dbias, dbias) < LOOSE[dtype]


def test_dz_skips_the_last_activation(client: Client) -> None:
    net = Network("float64", ("relu", "relu", "gelu"))
    dz = np.asarray(f64(net.dy) * activation_prime("gelu", net.forward()[1][-1]))
    _, tape = client.mlp(net.x, net.layers(), save_tape=True)
    got = client.mlp_backward(tape, dz=dz)
    assert got.dx is None
    for layer, dweight in zip(got.layers, net.backward()[1], strict=True):
        assert relative(layer.dweight, dweight) < 1e-12


def test_layers_without_bias_have_no_bias_gradient(client: Client) -> None:
    net = Network("float64", ("relu", "gelu", "none"), bias=False)
    _, tape = client.mlp(net.x, net.layers(), save_tape=True)
    got = client.mlp_backward(tape, dy=net.dy)
    assert [layer.dbias for layer in got.layers] == [None] * 3
    assert relative(got.layers[0].dweight, net.backward()[1][0]) < 1e-12


def test_a_tape_is_used_up_by_a_backward_pass_unless_it_is_kept(client: Client) -> None:
    net = Network("float32", ("relu", "relu", "none"))
    before = client.info()["tensors"]
    _, tape = client.mlp(net.x, net.layers(), save_tape=True)
    handle = tape.handle
    first = client.mlp_backward(tape, dy=net.dy, keep_tape=True)
    second = client.mlp_backward(tape, dy=net.dy)
    for one, other in zip(first.layers, second.layers, strict=True):
        np.testing.assert_array_equal(one.dweight, other.dweight)
    with pytest.raises(Gone):
        client.tensor(handle)
    after = client.info()["tensors"]
    assert (after["count"], after["nbytes"]) == (before["count"], before["nbytes"])


def test_gradients_are_those_at_the_weights_of_the_forward_pass(client: Client) -> None:
    net = Network("float64", ("relu", "relu", "none"))
    held = [client.put(weight) for weight in net.weights]
    layers = [
        Layer(weight, layer.bias, layer.activation)
        for weight, layer in zip(held, net.layers(), strict=True)
    ]
    _, tape = client.mlp(net.x, layers, save_tape=True)
    for weight in held:
        weight.replace(np.zeros(weight.shape))
    got = client.mlp_backward(tape, dy=net.dy, wants=["dx"])
    assert relative(got.dx, net.backward()[0]) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_sgd_inside_the_service(client: Client, dtype: str) -> None:
    net = Network(dtype, ("relu", "relu", "none"))
    weights = [client.put(weight) for weight in net.weights]
    biases = [client.put(bias) for bias in net.biases if bias is not None]
    layers = [
        Layer(w, b, layer.activation)
        for w, b, layer in zip(weights, biases, net.layers(), strict=True)
    ]
    _, tape = client.mlp(net.x, layers, save_tape=True)
    client.mlp_backward(
        tape,
        dy=net.dy,
        layers=[
            {"dweight": Accumulate(w, alpha=-0.1), "dbias": Accumulate(b, alpha=-0.1)}
            for w, b in zip(weights, biases, strict=True)
        ],
    )
    _, dweights, dbiases = net.backward()
    for held, before, step in zip(weights, net.weights, dweights, strict=True):
        assert relative(held.numpy(), f64(before) - 0.1 * step) < LOOSE[dtype]
    for held, old, step in zip(biases, net.biases, dbiases, strict=True):
        assert old is not None
        assert relative(held.numpy(), f64(old) - 0.1 * step) < LOOSE[dtype]


def test_an_empty_batch_trains_nothing(client: Client) -> None:
    net = Network("float32", ("relu", "gelu", "none"))
    y, tape = client.mlp(net.x[:0], net.layers(), save_tape=True)
    assert y.shape == (0, SIZES[-1])
    got = client.mlp_backward(tape, dy=net.dy[:0], wants=["dx", "dweight", "dbias"])
    assert isinstance(got.dx, np.ndarray)
    assert got.dx.shape == (0, SIZES[0])
    for layer, weight in zip(got.layers, net.weights, strict=True):
        np.testing.assert_array_equal(as_array(layer.dweight), np.zeros(weight.shape))


def as_array(value: object) -> Host:
    assert isinstance(value, np.ndarray)
    return value


def test_a_tape_is_consumed_once_however_many_ask_for_it(client: Client) -> None:
    net = Network("float32", ("relu", "relu", "none"))
    with client.zeros(net.weights[0].shape) as total, ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            _, tape = client.mlp(net.x, net.layers(), save_tape=True)
            handle = tape.release()

            def backward(_: int, handle: str = handle) -> bool:
                header = {
                    "tape": handle,
                    "dy": {"dtype": "float32", "shape": list(net.dy.shape), "payload": 0},
                    "wants": ["dweight"],
                    "layers": [{"dweight": {"tensor": total.handle, "beta": 1.0}}, {}, {}],
                }
                try:
                    client._channel.post("/v1/mlp/backward", header, [net.dy.data.cast("B")])
                except Gone:
                    return False
                return True

            assert sum(threads.map(backward, range(8))) == 1
        assert relative(total.numpy(), 10 * net.backward()[1][0]) < 1e-4
