"""The linear layers and stacks that `matmuld verify` asks for, and what they should give."""

from __future__ import annotations

import zlib
from typing import Any, get_args

import numpy as np
from matmuld_client import Client, Layer, RemoteTensor
from matmuld_client.wire import DTYPES

from .oracle import Activation, Array, Expected, Oracle, Outcomes, exact, f64, positive

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class LayerProblem:
    """A layer of k inputs and m outputs, n rows for it, or `batch` times as many, and a layer above
    it that has k outputs.
    """

    def __init__(self, dtype: str, size: tuple[int, int, int], batch: int | None) -> None:
        m, n, k = size
        lead = () if batch is None else (batch,)
        random = np.random.default_rng(zlib.crc32(f"layer {dtype} {size} {batch}".encode()))

        def normal(*shape: int, scale: float = 1.0) -> Array:
            numbers = random.standard_normal(shape, np.float32) * np.float32(scale)
            return numbers.astype(DTYPES[dtype])

        self._outputs = m
        self._oracle = Oracle(dtype)
        self._x, self._dy = normal(*lead, n, k), normal(*lead, n, m)
        self._weight, self._bias = normal(m, k, scale=k**-0.5), normal(m)
        self._above, self._bias_above = normal(k, m, scale=m**-0.5), normal(k)
        self._dy_above = normal(*lead, n, k)

    def run(self, client: Client, activation: Activation) -> Outcomes:
        """A forward pass, and a backward pass for every gradient.

        Gradients are expected at the aux that the forward pass gave, which is an output itself.
        """
        oracle, x = self._oracle, self._x
        if activation == "none":
            y, aux, kept = client.linear(x, self._weight, self._bias), np.empty(0), None
        else:
            y, kept = client.linear(
                x, self._weight, self._bias, activation=activation, save_aux=True
            )
            aux = self._read(kept)
        z = oracle.plus(oracle.product(exact(x), self._weight.T), f64(self._bias))
        outcomes = {"y": (y, oracle.rounded(oracle.activated(activation, z)))}
        if kept is not None:
            known = positive(z) if activation == "relu" else oracle.rounded(z)
            outcomes[kept.kind] = (aux, known.reshape(-1, self._outputs))
        outcomes |= self._backward(client, activation, kept, aux)
        if kept is not None:
            outcomes |= self._masked(client, activation, kept, aux)
        return outcomes

    def _read(self, aux: RemoteTensor) -> Array:
        """A mask or pre-activations, (batch, out)."""
        if aux.kind == "relu_aux":
            return aux.mask().astype(np.uint8)
        return aux.numpy()[: self._outputs].T

    def _backward(
        self, client: Client, activation: Activation, kept: RemoteTensor | None, aux: Array
    ) -> Outcomes:
        oracle, dy = self._oracle, exact(self._dy.reshape(-1, self._outputs))
        given: dict[str, Any] = {"dz": self._dy}
        dz = dy
        if kept is not None:
            given = {"dy": self._dy, "aux": kept}
            dz = oracle.rounded(oracle.times_slope(activation, dy, aux))
        got = client.linear_backward(self._weight, self._x, **given)
        flat = self._x.reshape(-1, self._x.shape[-1])
        expected = {
            "dx": oracle.product(dz, self._weight).reshape(*self._x.shape),
            "dweight": oracle.product(dz.T, flat),
            "dbias": oracle.summed(dz, 0),
        }
        return {name: (getattr(got, name), oracle.rounded(e)) for name, e in expected.items()}

    def _masked(
        self, client: Client, activation: Activation, kept: RemoteTensor, aux: Array
    ) -> Outcomes:
        """The input gradient of the layer above as this layer's dz, with and without its sums."""
        oracle, dz = self._oracle, self._dy_above
        given: Any = {"dz": dz, "input_aux": kept, "wants": ["dx"]}
        alone: Any = client.linear_backward(self._above, **given).dx
        both: Any = client.linear_backward(self._above, **given, input_dbias=True)
        product = oracle.product(exact(dz.reshape(-1, dz.shape[-1])), self._above)
        below = oracle.times_slope(activation, product, aux)
        expected = oracle.rounded(below).reshape(*dz.shape[:-1], self._outputs)
        sums = oracle.rounded(oracle.summed(oracle.rounded(below), 0))
        return {
            "masked dx": (alone, expected),
            "masked dx with its sums": (both.dx, expected),
            "input_dbias": (both.input_dbias, sums),
        }

    def run_stack(self, client: Client, activation: Activation) -> Outcomes:
        """Both layers as a stack, forward with a tape and backward for every gradient."""
        oracle, x, dy = self._oracle, self._x, self._dy_above
        layers = [
            Layer(self._weight, self._bias, activation),
            Layer(self._above, self._bias_above),
        ]
        y, tape = client.mlp(x, layers, save_tape=True)
        got = client.mlp_backward(tape, dy=dy, wants=["dx", "dweight", "dbias"])
        flat = exact(x.reshape(-1, x.shape[-1]))
        z = oracle.plus(oracle.product(flat, self._weight.T), f64(self._bias))
        hidden = oracle.rounded(oracle.activated(activation, z))
        top = oracle.plus(oracle.product(hidden, self._above.T), f64(self._bias_above))
        dz_above = exact(dy.reshape(-1, dy.shape[-1]))
        dz = oracle.rounded(
            oracle.times_slope_at(activation, oracle.product(dz_above, self._above), z)
        )
        expected: dict[str, tuple[Any, Expected]] = {
            "y": (y, top.reshape(*y.shape)),
            "dx": (got.dx, oracle.product(dz, self._weight).reshape(*x.shape)),
            "dweight": (got.layers[0].dweight, oracle.product(dz.T, x.reshape(-1, x.shape[-1]))),
            "dbias": (got.layers[0].dbias, oracle.summed(dz, 0)),
            "dweight above": (
                got.layers[1].dweight,
                oracle.product(hidden.T, dy.reshape(-1, dy.shape[-1])).T,
            ),
            "dbias above": (got.layers[1].dbias, oracle.summed(dz_above, 0)),
        }
        return {name: (value, oracle.rounded(e)) for name, (value, e) in expected.items()}
