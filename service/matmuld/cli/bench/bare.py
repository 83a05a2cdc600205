"""What HTTP alone costs: bare servers under the service's own settings.

    python -m matmuld.cli.bench.bare KIND FD…

They listen on the sockets that they inherit. `asgi` and `fastapi` are echoes: ``POST /N`` answers
with the first N bytes of the body. `product` computes: ``POST /SIZE`` is the forward pass of that
layer, for the row that ends the body, and nothing is checked.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from matmuld_client.wire import MSGPACK
from starlette.types import ASGIApp, Receive, Scope, Send

from ..sockets import address_of, listening
from .load import Layer
from .results import SIZES


@contextmanager
def serving(kind: str, addresses: Sequence[str]) -> Iterator[list[str]]:
    """Where a bare server in a process of its own can be reached, each address in turn."""
    with listening(addresses) as sockets:
        descriptors = [sock.fileno() for sock in sockets]
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, kind, *map(str, descriptors)], pass_fds=descriptors
        )
        try:
            yield [address_of(sock) for sock in sockets]
        finally:
            process.terminate()
            process.wait()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await _body(receive)
    await _reply(send, body[: int(scope["path"][1:])])


def fastapi_echo() -> FastAPI:
    app = FastAPI()

    @app.post("/{size}")
    async def answer(request: Request) -> Response:
        body = await request.body()
        return Response(body[: int(request.path_params["size"])], media_type=MSGPACK)

    return app


def product() -> ASGIApp:
    layers = {f"/{size}": Layer(size) for size in SIZES}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        layer = layers[scope["path"]]
        body = await _body(receive)
        row = np.frombuffer(body, np.float32, offset=len(body) - layer.x.nbytes)
        await _reply(send, layer.forward(row.reshape(1, -1)).tobytes())

    return app


async def _body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    return body


async def _reply(send: Send, body: bytes) -> None:
    headers = [(b"content-type", MSGPACK.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(kind: str, descriptors: Sequence[int]) -> None:
    apps: dict[str, Callable[[], ASGIApp]] = {
        "asgi": lambda: echo,
        "fastapi": fastapi_echo,
        "product": product,
    }
    config = uvicorn.Config(
        apps[kind](),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    uvicorn.Server(config).run([socket.socket(fileno=descriptor) for descriptor in descriptors])


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
