"""The floor of the HTTP stack: echoes under the service's own server settings, on sockets that are passed in.

    python -m matmuld.cli.bench.echo asgi|fastapi FD…

``POST /N`` answers with the first N bytes of the body.
"""

from __future__ import annotations

import socket
import sys

import uvicorn
from fastapi import FastAPI, Request, Response
from matmuld_client.wire import MSGPACK
from starlette.types import ASGIApp, Receive, Scope, Send


async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
    """A bare ASGI callable."""
    message = await receive()
    body = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    reply = body[: int(scope["path"][1:])]
    headers = [(b"content-type", MSGPACK.encode()), (b"content-length", b"%d" % len(reply))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply})


def fastapi() -> FastAPI:
    """The same as a route of FastAPI."""
    app = FastAPI()

    @app.post("/{size}")
    async def echo(request: Request) -> Response:
        body = await request.body()
        return Response(body[: int(request.path_params["size"])], media_type=MSGPACK)

    return app


def serve(app: ASGIApp, sockets: list[socket.socket]) -> None:
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
    listening = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    serve({"asgi": asgi, "fastapi": fastapi()}[kind], listening)
