"""A step of the demo's network on the GPU, every gradient against PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matmuld_client import Client, Layer

from ..local import running
from ..reference import ACTIVATIONS, DTYPES, Host, f64

pytestmark = pytest.mark.gpu

SIZES = (64, 512, 512, 10)
BATCH = 128
BARS = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Client]:
    path = tmp_path / "s"
    with running(path, device="cuda:0"), Client(f"unix:{path}") as client:
        yield client


def network(dtype: str) -> tuple[list[Host], list[Host], Host, np.ndarray[Any, Any]]:
    """Weights, biases, handwritten digits and their labels."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)
    weights = [
        (rng.standard_normal((o, i)) * np.sqrt(2 / i)).astype(DTYPES[dtype])
        for i, o in pairwise(SIZES)
    ]
    biases = [(0.1 * rng.standard_normal(o)).astype(DTYPES[dtype]) for o in SIZES[1:]]
    digits = load_digits()
    return weights, biases, (digits.data[:BATCH] / 16).astype(DTYPES[dtype]), digits.target[:BATCH]


def with_torch(
    dtype: str, activation: Any, weights: list[Host], biases: list[Host], x: Host, labels: Host
) -> tuple[list[Host], Host, Host]:
    """Gradients of all parameters, of x and of the logits, in PyTorch on the GPU."""
    import torch

    def leaf(array: Host) -> Any:
        host = torch.tensor(f64(array), dtype=getattr(torch, dtype), device="cuda")
        return host.requires_grad_()

    functional = torch.nn.functional
    functions: dict[str, Any] = {
        "relu": functional.relu,
        "gelu": lambda z: functional.gelu(z, approximate="tanh"),
        "gelu_erf": functional.gelu,
        "silu": functional.silu,
        "leaky_relu": functional.leaky_relu,
    }
    parameters = [leaf(p) for pair in zip(weights, biases, strict=True) for p in pair]
    held = hidden = leaf(x)
    for index in range(0, len(parameters), 2):
        hidden = functional.linear(hidden, parameters[index], parameters[index + 1])
        if index < len(parameters) - 2:
            hidden = functions[activation](hidden)
    hidden.retain_grad()
    loss = functional.cross_entropy(hidden.float(), torch.tensor(labels, device="cuda"))
    loss.backward()

    def down(tensor: Any) -> Host:
        return np.asarray(tensor.detach().double().cpu().numpy())

    return [down(p.grad) for p in parameters], down(held.grad), down(hidden.grad)


def relative(got: object, expected: Host) -> float:
    assert isinstance(got, np.ndarray)
    return float(np.linalg.norm(f64(got) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", BARS)
def test_every_gradient_of_a_step_is_autograds(gpu: Client, dtype: str, activation: Any) -> None:
    weights, biases, x, labels = network(dtype)
    expected, dx, dlogits = with_torch(dtype, activation, weights, biases, x, labels)
    names: Any = [activation, activation, "none"]
    layers = [
        Layer(gpu.put(w), gpu.put(b), name)
        for w, b, name in zip(weights, biases, names, strict=True)
    ]
    _, tape = gpu.mlp(x, layers, save_tape=True)
    dy = dlogits.astype(DTYPES[dtype])
    got = gpu.mlp_backward(tape, dy=dy, wants=["dx", "dweight", "dbias"])
    errors = [relative(got.dx, dx)]
    for index, layer in enumerate(got.layers):
        errors.append(relative(layer.dweight, expected[2 * index]))
        errors.append(relative(layer.dbias, expected[2 * index + 1]))
    print(f"{dtype} {activation}: " + ", ".join(f"{error:.2e}" for error in errors))
    assert max(errors) <= BARS[dtype]


def test_the_aux_of_both_engines_is_the_same_bit_by_bit(gpu: Client, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "cpu"
    with running(path, device="cpu"), Client(f"unix:{path}") as cpu:
        for batch, inputs, outputs in [(7, 20, 33), (64, 300, 129), (128, 1000, 1000)]:
            x = rng.standard_normal((batch, inputs)).astype(np.float32)
            weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
            bias = rng.standard_normal(outputs).astype(np.float32)
            z = f64(x) @ f64(weight).T + f64(bias)
            masks, bytes_ = [], []
            for client in (cpu, gpu):
                _, aux = client.linear(x, weight, bias, activation="relu", save_aux=True)
                masks.append(aux.mask())
                bytes_.append(aux.numpy().shape)
            sure = np.abs(z) > 1e-6 * np.sqrt(inputs)
            assert sure.mean() > 0.999
            np.testing.assert_array_equal(masks[0][sure], masks[1][sure])
            np.testing.assert_array_equal(masks[0][sure], (z > 0)[sure])
            assert bytes_[0] == bytes_[1]
