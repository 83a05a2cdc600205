"""The linear layers that `matmuld verify` asks for, and what they should give."""

from __future__ import annotations

import zlib
from typing import Any, get_args

import numpy as np
from matmuld_client import Client, RemoteTensor
from matmuld_client.wire import DTYPES

from .oracle import Activation, Array, Oracle, Outcomes, exact, f64, positive

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class LayerProblem:
    """A layer of k inputs and m outputs, and n rows for it, or `batch` times as many."""

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
        return outcomes | self._backward(client, activation, kept, aux)

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
