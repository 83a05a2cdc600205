"""The measuring process: every cell once a round, over a connection of its own.

It and the servers share one core: only one of them has work at a time, and on two cores it would be
the scheduler's choice of core that decides, which is worth half an echo and changes by the second.

    python -m matmuld.cli.bench.measure DEVICE ROUNDS SECONDS

Prints a line of JSON about the device, then one for each measurement. Exit status 1: wrong answer.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
from matmuld_client import Client
from matmuld_client.wire import MSGPACK, pack, unpack

from ..failure import Failure
from ..server import child
from .bare import serving
from .load import Array, Layer, Steal, Subject, Wire, post_request
from .results import CELLS, SIZES, TRANSPORTS, Cell, Measurement, Server, Transport

Addresses = dict[tuple[Server, Transport], str]
Subjects = dict[Cell, Subject]
BARE: tuple[Server, ...] = ("asgi", "fastapi", "product")


def main(device: str, rounds: int, seconds: float) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
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
                measurement = Measurement.of(cell, took, steal.share())
                print(measurement.model_dump_json(), flush=True)


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
        for kind in BARE:
            asked = ["http://127.0.0.1:0", f"unix:{folder}/{kind}"]
            given = stack.enter_context(serving(kind, asked))
            addresses |= {(kind, way): at for way, at in zip(TRANSPORTS, given, strict=True)}
        yield client, addresses


def subjects(size: int, client: Client, addresses: Addresses, stack: ExitStack) -> Subjects:
    """Every cell of one size; what they need to be open is closed by `stack`."""
    layer = Layer(size)
    weight, bias = client.put(layer.weight, pinned=True), client.put(layer.bias, pinned=True)
    body = forward_body(layer, weight.handle, bias.handle)
    told = body[: size * 4 + 50]  # about as long as an answer
    checks: dict[Server, tuple[str, Callable[[memoryview], None]]] = {
        "asgi": (f"/{len(told)}", partial(check_echo, told)),
        "fastapi": (f"/{len(told)}", partial(check_echo, told)),
        "product": (f"/{size}", lambda reply: layer.check(row(reply))),
        "matmuld": ("/v1/linear/forward", lambda reply: layer.check(row(unpack(reply)[1][0]))),
    }
    found = {Cell("numpy", "direct", size): Subject(partial(layer.forward, layer.x), layer.check)}
    for way in TRANSPORTS:
        for server, (target, check) in checks.items():
            wire = Wire(addresses[server, way])
            post = partial(wire.post, post_request(target, MSGPACK, body))
            found[Cell(server, way, size)] = Subject(post, check, wire)
        sdk = stack.enter_context(Client(addresses["matmuld", way]))
        linear = partial(sdk.linear, layer.x, weight, bias, activation="relu")
        found[Cell("sdk", way, size)] = Subject(linear, layer.check)
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


def row(data: memoryview) -> Array:
    """An answer, from its bytes."""
    return np.frombuffer(data, np.float32).reshape(1, -1)


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
