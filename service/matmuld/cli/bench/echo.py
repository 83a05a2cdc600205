"""The floor of the HTTP stack: echoes under the service's own server settings.

    python -m matmuld.cli.bench.echo asgi|fastapi FD…

Listens on the sockets that it inherits; ``POST /N`` answers with the first N bytes of the body.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from matmuld_client.wire import MSGPACK
from starlette.types import ASGIApp, Receive, Scope, Send

from ..sockets import address_of, listening


@contextmanager
def echoing(kind: str, addresses: Sequence[str]) -> Iterator[list[str]]:
    """Where an echo in a process of its own can be reached, each address in turn."""
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


async def _asgi(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    body = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    reply = body[: int(scope["path"][1:])]
    headers = [(b"content-type", MSGPACK.encode()), (b"content-length", b"%d" % len(reply))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


def _fastapi() -> FastAPI:
    app = FastAPI()

    @app.post("/{size}")
    async def answer(request: Request) -> Response:
        body = await request.body()
        return Response(body[: int(request.path_params["size"])], media_type=MSGPACK)

    return app


def _serve(app: ASGIApp, sockets: list[socket.socket]) -> None:
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
    )
    uvicorn.Server(config).run(sockets)


if __name__ == "__main__":
    kind, *descriptors = sys.argv[1:]
    inherited = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    _serve(_asgi if kind == "asgi" else _fastapi(), inherited)
