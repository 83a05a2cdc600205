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


@pytest.mark.parametrize("name", REQUESTS)
def test_a_reply_that_nobody_takes_leaves_no_handle(
    socket_path: Path, wire: Wire, name: str
) -> None:
    path, header = REQUESTS[name]
    payloads = [raw(X)] if name == "tensor" else [raw(X), raw(WEIGHT)]
    assert wire.send(path, header, *payloads).status < 300
    before = wire.get("/v1/info")["tensors"]["count"]
    body = packed(header, *payloads)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/msgpack\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(socket_path))
            client.sendall(head.encode() + body)
    deadline = time.monotonic() + 10
    while (count := wire.get("/v1/info")["tensors"]["count"]) != before:
        assert time.monotonic() < deadline, f"{count - before} handles were left behind"
        time.sleep(0.05)
