"""`matmuld demo`: what it promises, and the reference that it checks gradients with."""

from __future__ import annotations

import math
import re
from io import StringIO
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from matmuld.cli.demo import check
from matmuld.cli.failure import Failure
from matmuld.cli.training import cross_entropy, reference_gradients
from rich.console import Console

from .console import matmuld


def test_the_network_learns_in_time_and_finds_its_plans(device: str, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    began = monotonic()
    ended = matmuld("demo", "--device", device, "--output", str(image))
    assert ended.returncode == 0, ended.stderr
    assert monotonic() - began < 60
    assert f"device {device}" in ended.stdout
    assert _number("relative error", ended.stdout) < 1e-5
    assert _number("test accuracy │", ended.stdout) >= 97.0
    assert _number("plan hit rate │", ended.stdout) >= 99.0
    assert image.read_bytes().startswith(b"\x89PNG\r\n")


def _number(label: str, text: str) -> float:
    """The first number behind a label, however wide the column is."""
    found = re.search(re.escape(label).replace(r"\ ", r"\s+") + r"\s+([\d.e+-]+)", text)
    assert found, text
    return float(found[1])


@pytest.mark.parametrize("folder", ["/nowhere", "/proc"])
def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_trained(
    folder: str,
) -> None:
    began = monotonic()
    ended = matmuld("demo", "--output", f"{folder}/image.png")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"matmuld: output: cannot write to {folder}: ")
    assert ended.stderr.count("\n") == 1
    assert monotonic() - began < 10


@pytest.mark.parametrize("error", [1.1e-5, math.inf, math.nan])
def test_a_gradient_that_is_off_is_a_failure(error: float) -> None:
    console = Console(file=StringIO())
    check({"dweight of layer 1": 9e-6}, console)
    with pytest.raises(Failure, match="dbias of layer 2"):
        check({"dweight of layer 1": 1e-7, "dbias of layer 2": error}, console)


def test_the_reference_gradients_are_those_of_the_loss() -> None:
    random = np.random.default_rng(0)
    weights = [random.standard_normal((o, i)) for i, o in ((4, 6), (6, 5), (5, 3))]
    biases = [random.standard_normal(len(weight)) for weight in weights]
    x, labels = random.standard_normal((7, 4)), random.integers(0, 3, 7)

    def loss() -> float:
        h = x
        for weight, bias in zip(weights, biases, strict=True):
            z = h @ weight.T + bias
            h = np.maximum(z, 0)
        return cross_entropy(z, labels)[0]

    gradients = reference_gradients(weights, biases, x, labels)
    for parameters, index in ((weights, 0), (biases, 1)):
        for layer, parameter in enumerate(parameters):
            numeric = np.zeros_like(parameter)
            for at in np.ndindex(parameter.shape):
                kept, sides = parameter[at], []
                for step in (1e-6, -1e-6):
                    parameter[at] = kept + step
                    sides.append(loss())
                parameter[at] = kept
                numeric[at] = (sides[0] - sides[1]) / 2e-6
            np.testing.assert_allclose(gradients[layer][index], numeric, atol=1e-8)
