"""A running service: in this process, or in a child of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import NoReturn

import uvicorn
import uvloop
from matmuld_client import Client

from ..http.app import Application
from ..http.connection import Connection
from ..settings import Settings
from .failure import Failure
from .sockets import address_of, listening

log = logging.getLogger("matmuld")

DRAIN_SECONDS = 10
_START_SECONDS = 120
"""Loading CUDA's libraries from a cold disk takes its time."""
_REQUEST_SECONDS = 120.0


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        Failure: the device is missing, or an address cannot be had.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    app = Application(settings)
    server = _Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",  # opened below, where its errors can be told in one line
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
    )

    def stop(number: int) -> None:
        if app.service is not None:
            app.service.tuner.stop()
        server.handle_exit(number, None)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    with listening(settings.listen) as sockets:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(app.router.lifespan_context(app))
            except RuntimeError as error:
                raise Failure(str(error)) from error
            gc.freeze()  # what lives as long as the service is not worth looking through
            _announce(app, settings, sockets)
            await server.serve(sockets)
    log.info("stopped")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """They are captured already; uvicorn would raise them again in the end."""
        yield


def _announce(app: Application, settings: Settings, sockets: Sequence[socket.socket]) -> None:
    assert app.service is not None
    device = app.service.runtime.engine.name
    if settings.device == "auto":
        why = "no usable CUDA device was found" if device == "cpu" else "the first CUDA device"
        log.info("device auto: %s, %s", device, why)
    for sock in sockets:
        log.info("listening on %s", address_of(sock))


@contextmanager
def child(device: str, *flags: str) -> Iterator[Client]:
    """A client of a service in a process of its own, on a socket that nobody else knows.

    Raises:
        Failure: it did not start.
    """
    with TemporaryDirectory(prefix="matmuld-") as folder:
        address = f"unix:{folder}/socket"
        serve = ["serve", "--device", device, "--listen", address, "--log-level", "warning"]
        command = [sys.executable, "-m", "matmuld", *serve, *flags]
        signal.signal(signal.SIGTERM, _exit)  # or the child would outlive this process
        process = subprocess.Popen(command)
        try:
            with Client(address, timeout=_REQUEST_SECONDS) as client:
                _await_ready(client, process)
                yield client
        finally:
            process.terminate()
            process.wait()


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _await_ready(client: Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not client.ready():
        if process.poll() is not None:
            raise Failure(f"the service did not start, its exit status is {process.returncode}")
        if time.monotonic() > deadline:
            raise Failure(f"the service was not ready within {_START_SECONDS} seconds")
        time.sleep(0.02)
