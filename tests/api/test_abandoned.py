"""Clients that hang up before their reply leave no handle behind."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import numpy as np
import pytest

from ..local import Wire, packed, raw, tensor
from .refusals import FORWARD, MLP_FORWARD, TENSORS

X = np.ones((400, 700), np.float32)
WEIGHT = np.ones((900, 700), np.float32)
LAYER = {"weight": tensor(WEIGHT, 1)}
REQUESTS = {
    "aux": (
        FORWARD,
        {"x": tensor(X, 0), **LAYER, "activation": "relu", "save_aux": True},
    ),
    "result": (FORWARD, {"x": tensor(X, 0), **LAYER, "outputs": {"y": "tensor"}}),
    "tape": (MLP_FORWARD, {"x": tensor(X, 0), "layers": [LAYER], "save_tape": True}),
    "tensor": (TENSORS, {"value": tensor(X, 0)}),
}


ABANDONED = 20


@pytest.mark.parametrize("name", REQUESTS)
def test_a_reply_that_nobody_takes_leaves_no_handle(
    socket_path: Path, wire: Wire, name: str
) -> None:
    """But where the service was done before the client had hung up, which the test allows for."""
    path, header = REQUESTS[name]
    payloads = [raw(X)] if name == "tensor" else [raw(X), raw(WEIGHT)]
    assert wire.send(path, header, *payloads).status < 300
    before = held(wire)
    body = packed(header, *payloads)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/msgpack\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    for _ in range(ABANDONED):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(socket_path))
            client.sendall(head.encode() + body)
    time.sleep(1)
    left = held(wire) - before
    for handle in left:
        wire.request("DELETE", f"{TENSORS}/{handle}")
    assert len(left) <= ABANDONED // 4


def held(wire: Wire) -> set[str]:
    return {tensor["tensor"] for tensor in wire.get(TENSORS)["tensors"]}
