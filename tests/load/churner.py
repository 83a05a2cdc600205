"""Churners: no two requests alike."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from locust import between, task
from matmuld_client.operations import Activation, LinearGradients

from tests.load.caller import Caller
from tests.load.expected import Dense, check, check_stack
from tests.reference import Host, f64, random

T = TypeVar("T")

DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "gelu", "silu", "leaky_relu")
LARGEST = 160


class Churner(Caller):
    """Sends shapes that were never there before, and checks every answer."""

    weight = 2
    wait_time = between(0, 0.01)

    @task(4)
    def forward(self) -> None:
        batch, inputs, outputs = self._shape()
        dtype, activation = self._pick(DTYPES), self._pick(ACTIVATIONS)
        layer = Dense.random(self.rng, inputs, outputs, dtype, activation)
        x = random(self.rng, (batch, inputs), dtype)
        self.ask(
            "linear/forward",
            lambda: self.client.linear(x, layer.weight, layer.bias, activation=activation),
            lambda y: check_stack([layer], x, y),
        )

    @task(2)
    def backward(self) -> None:
        batch, inputs, outputs = self._shape()
        dtype = self._pick(DTYPES)
        weight = random(self.rng, (outputs, inputs), dtype)
        x, dz = (random(self.rng, (batch, size), dtype) for size in (inputs, outputs))
        self.ask(
            "linear/backward",
            lambda: self.client.linear_backward(weight, x, dz=dz),
            lambda found: check_gradients(found, weight, x, dz),
        )

    @task(2)
    def matmul(self) -> None:
        m, n, k = self._shape()
        dtype = self._pick(DTYPES)
        a, b = random(self.rng, (k, m), dtype).T, random(self.rng, (k, n), dtype)
        bias = random(self.rng, (m,), dtype)

        def check_product(d: Host) -> None:
            exact = f64(a) @ f64(b) + f64(bias)[:, None]
            scale = np.abs(f64(a)) @ np.abs(f64(b)) + np.abs(f64(bias))[:, None]
            check(d, np.maximum(exact, 0), scale)

        self.ask(
            "matmul", lambda: self.client.matmul(a, b, epilog="RELU_BIAS", bias=bias), check_product
        )

    @task(1)
    def evict(self) -> None:
        if self.rng.random() < 0.1:
            self.ask("DELETE plans", self.client.evict_plans)

    def _shape(self) -> tuple[int, int, int]:
        first, second, third = self.rng.integers(1, LARGEST + 1, 3).tolist()
        return first, second, third

    def _pick(self, names: tuple[T, ...]) -> T:
        return names[int(self.rng.integers(len(names)))]


def check_gradients(found: LinearGradients, weight: Host, x: Host, dz: Host) -> None:
    """Raise AssertionError unless all three are right."""
    dz64, x64, weight64 = f64(dz), f64(x), f64(weight)
    size = np.abs(dz64)
    for gradient, exact, scale in (
        (found.dx, dz64 @ weight64, size @ np.abs(weight64)),
        (found.dweight, dz64.T @ x64, size.T @ np.abs(x64)),
        (found.dbias, dz64.sum(0), size.sum(0)),
    ):
        assert isinstance(gradient, np.ndarray)
        check(gradient, exact, scale)
