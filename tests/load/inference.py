"""Inference workers: resident weights, small batches, and the weights of others."""

from __future__ import annotations

import numpy as np
from locust import task
from locust.exception import RescheduleTask
from matmuld_client import Layer, RemoteTensor

from tests.load.caller import Caller
from tests.load.expected import Dense, check_stack
from tests.load.shared import SHARED, Shared
from tests.reference import Host, random

DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = ("relu", "gelu", "silu")
INPUTS, HIDDEN, OUTPUTS = 256, 192, 64
BATCH = 32
CHECKED_SHARE = 0.25


class InferenceWorker(Caller):
    """Passes small batches forward through a model of its own, and through shared weights."""

    weight = 4

    def on_start(self) -> None:
        super().on_start()
        self.others: dict[str, RemoteTensor] = {}
        self.dtype = DTYPES[self.number % len(DTYPES)]
        activation = ACTIVATIONS[self.number % len(ACTIVATIONS)]
        self.model = [
            Dense.random(self.rng, INPUTS, HIDDEN, self.dtype, activation),
            Dense.random(self.rng, HIDDEN, OUTPUTS, self.dtype, "none"),
        ]
        self.layers = [
            Layer(
                self.client.put(layer.weight, pinned=True),
                self.client.put(layer.bias, pinned=True),
                activation,  # type: ignore[arg-type]
            )
            for layer, activation in zip(self.model, (activation, "none"), strict=True)
        ]

    @task(6)
    def forward(self) -> None:
        layer, x = self.layers[0], self._batch()
        self.ask(
            "linear/forward",
            lambda: self.client.linear(x, layer.weight, layer.bias, activation=layer.activation),
            (lambda y: check_stack(self.model[:1], x, y)) if self._looks() else None,
        )

    @task(2)
    def stack(self) -> None:
        x = self._batch()
        self.ask(
            "mlp/forward",
            lambda: self.client.mlp(x, self.layers),
            (lambda y: check_stack(self.model, x, y)) if self._looks() else None,
        )

    @task(3)
    def shared(self) -> None:
        shared, since, weight = self._shared()
        x = self.rng.integers(-4, 5, (int(self.rng.integers(1, BATCH + 1)), shared.size))
        x32 = x.astype(np.float32)
        self.ask(
            "linear/forward, shared",
            lambda: self.client.linear(x32, weight),
            lambda y: shared.check(y, since, lambda contents: x @ contents.T),
        )

    @task(1)
    def download(self) -> None:
        shared, since, weight = self._shared()
        self.ask(
            "GET tensors, shared",
            weight.numpy,
            lambda contents: shared.check(contents, since, lambda whole: whole),
        )

    def _shared(self) -> tuple[Shared, int, RemoteTensor]:
        """A weight that is replaced all the time, and the version that is there at least."""
        if not SHARED:
            raise RescheduleTask
        shared = SHARED[int(self.rng.integers(len(SHARED)))]
        if shared.handle not in self.others:
            tensor = self.client.tensor(shared.handle)
            assert isinstance(tensor, RemoteTensor)
            self.others[shared.handle] = tensor
        return shared, shared.done, self.others[shared.handle]

    def _batch(self) -> Host:
        return random(self.rng, (int(self.rng.integers(1, BATCH + 1)), INPUTS), self.dtype)

    def _looks(self) -> bool:
        return bool(self.rng.random() < CHECKED_SHARE)
