"""Trainers: forward with a tape, backward into the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from locust import between, task
from matmuld_client import Accumulate, Layer, MLPGradients, RemoteTensor

from tests.load.caller import Caller
from tests.load.expected import Dense, check_stack
from tests.reference import F64, Host, assert_close, f64, random

BATCH, INPUTS, HIDDEN, OUTPUTS = 64, 32, 48, 8
RATE = 0.05
STEPS = 120
LOOK_EVERY = 10
FALL_EVERY = 30


@dataclass
class Model:
    """Two layers in the service: ReLU between them, and what their loss was, step by step."""

    layers: list[Layer]
    losses: list[float]

    @property
    def held(self) -> list[RemoteTensor]:
        """First weight and bias, second weight and bias."""
        return [t for layer in self.layers for t in (layer.weight, layer.bias)]  # type: ignore[misc]


class Trainer(Caller):
    """Fits a function by gradient descent; begins anew when it has done so."""

    weight = 2
    wait_time = between(0, 0.01)

    def on_start(self) -> None:
        super().on_start()
        self.x = random(self.rng, (BATCH, INPUTS), "float32")
        teacher = self.rng.standard_normal((INPUTS, OUTPUTS)) * INPUTS**-0.5
        self.target = np.tanh(self.x @ teacher).astype(np.float32)
        self.model = self._fresh()

    def _fresh(self) -> Model:
        first = Dense.random(self.rng, INPUTS, HIDDEN, "float32", "relu")
        second = Dense.random(self.rng, HIDDEN, OUTPUTS, "float32", "none")
        put = self.client.put
        layers = [
            Layer(put(first.weight), put(first.bias), "relu"),
            Layer(put(second.weight), put(second.bias)),
        ]
        return Model(layers, [])

    @task
    def step(self) -> None:
        model, step = self.model, len(self.model.losses)
        looks = step % LOOK_EVERY == 0
        before = self._fetched() if looks else []
        y, tape = self.ask(
            "mlp/forward",
            lambda: self.client.mlp(self.x, model.layers, save_tape=True),
            lambda answer: self._check_forward(answer[0], before),
        )
        dy = (2 * RATE / BATCH) * (y - self.target)
        updates = [
            {
                "dweight": Accumulate(layer.weight, alpha=-1.0),  # type: ignore[arg-type]
                "dbias": Accumulate(layer.bias, alpha=-1.0),  # type: ignore[arg-type]
            }
            for layer in model.layers
        ]

        def backward() -> MLPGradients:
            return self.client.mlp_backward(tape, dy=dy, layers=updates)

        self.ask("mlp/backward", backward)
        if looks:
            check_update(before, self._fetched(), self.x, dy)
        if step + 1 == STEPS:
            for tensor in model.held:
                self.ask("DELETE tensors", tensor.free)
            self.model = self._fresh()

    def _fetched(self) -> list[Host]:
        return [self.ask("GET tensors", tensor.numpy) for tensor in self.model.held]

    def _check_forward(self, y: Host, before: list[Host]) -> None:
        """The loss is less than it was; with the weights, `y` is what they make of `x`."""
        losses = self.model.losses
        losses.append(float(np.mean((f64(y) - self.target) ** 2)))
        if len(losses) > FALL_EVERY:
            then, now = losses[-1 - FALL_EVERY], losses[-1]
            assert now < then, f"the loss rose from {then} to {now} in {FALL_EVERY} steps"
        if before:
            first, first_bias, second, second_bias = before
            layers = [Dense(first, first_bias, "relu"), Dense(second, second_bias, "none")]
            check_stack(layers, self.x, y)


def check_update(before: list[Host], after: list[Host], x: Host, dy: Host) -> None:
    """Raise AssertionError unless `after` is `before` less the gradients."""
    first, first_bias, second, _ = map(f64, before)
    z = f64(x) @ first.T + first_bias
    hidden, dz = np.maximum(z, 0), f64(dy)
    masked = (dz @ second) * (z > 0)
    size = np.abs(dz) @ np.abs(second)
    gradients: list[tuple[F64, F64]] = [
        (masked.T @ f64(x), size.T @ np.abs(f64(x))),
        (masked.sum(0), size.sum(0)),
        (dz.T @ hidden, np.abs(dz.T) @ hidden),
        (dz.sum(0), np.abs(dz).sum(0)),
    ]
    for old, new, (gradient, scale) in zip(before, after, gradients, strict=True):
        assert_close(new, f64(old) - gradient, np.abs(f64(old)) + scale, "float32")
