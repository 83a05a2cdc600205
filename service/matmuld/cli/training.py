"""The training of a small network by a service: the products there, the loss here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
from matmuld_client import Accumulate, Client, Layer, RemoteTensor, Tape
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Labels = NDArray[np.int64]

WIDTHS = (64, 512, 512, 10)
BATCH = 64
EPOCHS = 30
LEARNING_RATE = 0.5


@dataclass
class History:
    """Losses by step, test accuracies by epoch, and seconds: of every request, and of all steps."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Network:
    """A stack of layers whose weights live in the service."""

    def __init__(self, client: Client, random: np.random.Generator) -> None:
        self._client = client
        self.weights: list[RemoteTensor] = []
        self.biases: list[RemoteTensor] = []
        for inputs, outputs in pairwise(WIDTHS):
            weight = random.standard_normal((outputs, inputs), np.float32)
            scale = np.float32(math.sqrt(2.0 / inputs))  # He et al. 2015, for ReLU
            self.weights.append(client.put(weight * scale))
            self.biases.append(client.zeros((outputs,), np.float32))
        *hidden, last = zip(self.weights, self.biases, strict=True)
        self._layers = [*(Layer(w, b, "relu") for w, b in hidden), Layer(*last)]

    def forward(self, x: F32) -> tuple[F32, Tape]:
        return self._client.mlp(x, self._layers, save_tape=True)

    def predict(self, x: F32) -> Labels:
        labels: Labels = self._client.mlp(x, self._layers).argmax(axis=1)
        return labels

    def descend(self, tape: Tape, dz: F32, rate: float) -> None:
        """Take `rate` times its gradient off every weight, in the products that make gradients."""
        into = [
            {"dweight": Accumulate(weight, alpha=-rate), "dbias": Accumulate(bias, alpha=-rate)}
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        self._client.mlp_backward(tape, dz=dz, layers=into)

    def gradients(self, tape: Tape, dz: F32) -> list[tuple[Any, Any]]:
        """(dweight, dbias) of every layer."""
        layers = self._client.mlp_backward(tape, dz=dz).layers
        return [(layer.dweight, layer.dbias) for layer in layers]


class Training:
    """The network, and scikit-learn's handwritten digits, a fifth of them kept for the test."""

    epochs = EPOCHS

    def __init__(self, client: Client) -> None:
        pixels, labels = load_digits(return_X_y=True)
        pixels = (pixels / 16.0).astype(np.float32)
        self._x, self._x_test, self._labels, self._labels_test = train_test_split(
            pixels, labels.astype(np.int64), test_size=0.2, random_state=0, stratify=labels
        )
        self._random = np.random.default_rng(0)
        self._network = Network(client, self._random)

    def gradient_errors(self) -> dict[str, float]:
        """Relative errors of the first step's gradients, against float64."""
        network, x, labels = self._network, self._x[:BATCH], self._labels[:BATCH]
        y, tape = network.forward(x)
        computed = network.gradients(tape, cross_entropy(y, labels)[1])
        weights = [weight.numpy().astype(np.float64) for weight in network.weights]
        biases = [bias.numpy().astype(np.float64) for bias in network.biases]
        expected = reference_gradients(weights, biases, x.astype(np.float64), labels)
        errors: dict[str, float] = {}
        for index, pairs in enumerate(zip(computed, expected, strict=True), 1):
            for name, got, wanted in zip(("dweight", "dbias"), *pairs, strict=True):
                error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
                errors[f"{name} of layer {index}"] = float(error)
        return errors

    def run(self) -> Iterator[History]:
        """What has happened so far, after every epoch. The learning rate falls as half a cosine."""
        history = History()
        steps = EPOCHS * (len(self._x) // BATCH)
        for _ in range(EPOCHS):
            began = perf_counter()
            for x, labels in self._batches():
                rate = LEARNING_RATE * (1 + math.cos(math.pi * len(history.loss) / steps)) / 2
                self._step(x, labels, rate, history)
            history.seconds += perf_counter() - began
            right = self._network.predict(self._x_test) == self._labels_test
            history.accuracy.append(float(np.mean(right)))
            yield history

    def _batches(self) -> Iterator[tuple[F32, Labels]]:
        """In random order and all of one size, so that plans are found; a smaller rest is left."""
        order = self._random.permutation(len(self._x))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield self._x[chosen], self._labels[chosen]

    def _step(self, x: F32, labels: Labels, rate: float, history: History) -> None:
        began = perf_counter()
        y, tape = self._network.forward(x)
        history.forward.append(perf_counter() - began)
        loss, dz = cross_entropy(y, labels)
        began = perf_counter()
        self._network.descend(tape, dz, rate)
        history.backward.append(perf_counter() - began)
        history.loss.append(loss)


def cross_entropy(y: Any, labels: Labels) -> tuple[float, Any]:
    """The mean of ``-log softmax(y)`` at the labels, and its gradient by y."""
    shifted = y - y.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(np.mean(np.log(total[:, 0]) - shifted[rows, labels]))
    gradient = exponentials / total
    gradient[rows, labels] -= 1
    return loss, gradient / len(labels)


def reference_gradients(
    weights: list[F64], biases: list[F64], x: F64, labels: Labels
) -> list[tuple[F64, F64]]:
    """(dweight, dbias) of every layer, in float64 and unfused."""
    inputs = [x]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0.0))
    dz = cross_entropy(inputs[-1] @ weights[-1].T + biases[-1], labels)[1]
    gradients: list[tuple[F64, F64]] = []
    for weight, below in zip(weights[::-1], inputs[::-1], strict=True):
        gradients.insert(0, (dz.T @ below, dz.sum(axis=0)))
        dz = (dz @ weight) * (below > 0)
    return gradients
