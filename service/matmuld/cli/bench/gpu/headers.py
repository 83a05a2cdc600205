"""Headers of operations on tensors that are held: the same in process and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Header = dict[str, Any]


def forward(x: str, weight: str, bias: str, *, y: str | None = None, aux: bool = False) -> Header:
    """A layer with bias and ReLU; y goes into that tensor."""
    header: Header = {
        "x": {"tensor": x},
        "weight": {"tensor": weight},
        "bias": {"tensor": bias},
        "activation": "relu",
        "save_aux": aux,
    }
    return header if y is None else {**header, "outputs": {"y": {"tensor": y}}}


def layer_backward(
    dz: str, weight: str, x: str, mask: str, *, outputs: Sequence[str] = ()
) -> Header:
    """dx masked, dweight and dbias, which go into those tensors."""
    header: Header = {
        "dz": {"tensor": dz},
        "weight": {"tensor": weight},
        "x": {"tensor": x},
        "input_aux": {"tensor": mask},
    }
    if outputs:
        places = zip(("dx", "dweight", "dbias"), outputs, strict=True)
        header["outputs"] = {name: {"tensor": handle} for name, handle in places}
    return header


def stack(x: Header, weights: Sequence[str], biases: Sequence[str], y: str | None) -> Header:
    """Layers with bias and ReLU; y goes into that tensor, or comes back."""
    layers = [
        {"weight": {"tensor": weight}, "bias": {"tensor": bias}, "activation": "relu"}
        for weight, bias in zip(weights, biases, strict=True)
    ]
    outputs = {} if y is None else {"y": {"tensor": y}}
    return {"x": x, "layers": layers, "outputs": outputs}
