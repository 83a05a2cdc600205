"""The measuring process: every cell once a round, over one connection each.

    python -m matmuld.cli.bench.measure DEVICE ROUNDS SECONDS

Prints a line of JSON about the device, then one for each measurement. Exit status 1: wrong answer.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
from matmuld_client import Client
from matmuld_client.wire import MSGPACK, pack, unpack

from ..failure import Failure
from ..server import child
from .echo import echoing
from .load import Array, Layer, Steal, Subject, Wire, post_request
from .results import CELLS, SIZES, TRANSPORTS, Cell, Measurement, Server, Transport

Addresses = dict[tuple[Server, Transport], str]
Subjects = dict[Cell, Subject]
ECHOES: tuple[Server, ...] = ("asgi", "fastapi")


def main(device: str, rounds: int, seconds: float) -> None:
    with servers(device) as (client, addresses), ExitStack() as stack:
        print(json.dumps(client.info()["engine"]), flush=True)
        found: Subjects = {}
        for size in SIZES:
            found |= subjects(size, client, addresses, stack)
        steal = Steal()
        for number in range(rounds):
            start = number * len(CELLS) // rounds  # who comes first is another each time
            for cell in CELLS[start:] + CELLS[:start]:
                steal.share()
                took = found[cell].measure(seconds)
                print(
                    Measurement.of(cell, number, took, steal.share()).model_dump_json(), flush=True
                )


@contextmanager
def servers(device: str) -> Iterator[tuple[Client, Addresses]]:
    """All that is measured, each in a process of its own, and a client of the service."""
    with TemporaryDirectory(prefix="matmuld-") as folder, ExitStack() as stack:
        own = [f"http://127.0.0.1:{free_port()}", f"unix:{folder}/matmuld"]
        flags = [word for address in own for word in ("--listen", address)]
        client = stack.enter_context(child(device, *flags))
        addresses: Addresses = {
            ("matmuld", way): at for way, at in zip(TRANSPORTS, own, strict=True)
        }
        for kind in ECHOES:
            asked = ["http://127.0.0.1:0", f"unix:{folder}/{kind}"]
            given = stack.enter_context(echoing(kind, asked))
            addresses |= {(kind, way): at for way, at in zip(TRANSPORTS, given, strict=True)}
        yield client, addresses


def subjects(size: int, client: Client, addresses: Addresses, stack: ExitStack) -> Subjects:
    """Every cell of one size; what they need to be open is closed by `stack`."""
    layer = Layer(size)
    weight, bias = client.put(layer.weight, pinned=True), client.put(layer.bias, pinned=True)
    body = forward_body(layer, weight.handle, bias.handle)
    found = {Cell("numpy", "in process", size): Subject(layer.product, layer.check)}
    for way in TRANSPORTS:
        sdk = stack.enter_context(Client(addresses["matmuld", way]))
        found[Cell("sdk", way, size)] = Subject(
            partial(sdk.linear, layer.x, weight, bias, activation="relu"), layer.check
        )
        wire = Wire(addresses["matmuld", way])
        forward = partial(wire.post, post_request("/v1/linear/forward", MSGPACK, body))
        found[Cell("matmuld", way, size)] = Subject(
            forward, lambda reply: layer.check(answer(reply)), wire
        )
        with wire:
            told = body[: len(forward())]
        for server in ECHOES:
            wire = Wire(addresses[server, way])
            echo = partial(wire.post, post_request(f"/{len(told)}", MSGPACK, body))
            found[Cell(server, way, size)] = Subject(echo, partial(check_echo, told), wire)
    return found


def forward_body(layer: Layer, weight: str, bias: str) -> bytes:
    """The body of /v1/linear/forward, weight and bias by their handles."""
    header = {
        "x": {"dtype": "float32", "shape": list(layer.x.shape), "payload": 0},
        "weight": {"tensor": weight},
        "bias": {"tensor": bias},
        "activation": "relu",
    }
    return b"".join(pack(header, [layer.x.tobytes()]))


def answer(reply: memoryview) -> Array:
    """y of a reply."""
    header, payloads = unpack(reply)
    return np.frombuffer(payloads[0], np.float32).reshape(header["y"]["shape"])


def check_echo(sent: bytes, reply: memoryview) -> None:
    if reply != sent:
        raise Failure("an echo did not say what it was told")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except Failure as error:
        sys.exit(f"matmuld: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
