"""The measuring process: all closed loops, and then, from what they managed, all open ones.

    python -m matmuld.cli.bench.serve.measure DEVICE ROUNDS SECONDS

Prints a line of JSON about the device and the processes of the clients, then one for each point.
Exit status 1: wrong answer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.pool import Pool
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from matmuld_client.wire import MSGPACK

from ...failure import Failure
from ...server import child
from ..load import Array, Steal, post_request
from ..measure import forward_body, free_port
from ..results import Transport
from .clients import Work, be_ready, layer, poisson, work
from .results import (
    CLIENTS,
    CONNECTIONS,
    LOADS,
    TRANSPORTS,
    Point,
    Setting,
    Times,
    capacity,
)

_LEAD_SECONDS = 0.2
"""Until all connections are open."""
_WARM_SHARE = 0.2
"""Of a measurement, before anything counts."""
_MOST_PROCESSES = 8


class Laboratory:
    """A service, and the processes of its clients."""

    def __init__(
        self, pool: Pool, processes: int, addresses: dict[Transport, str], request: list[bytes]
    ) -> None:
        self._pool = pool
        self._processes = processes
        self._addresses = addresses
        self._request = request
        self._rng = np.random.default_rng(0)

    def measure(self, setting: Setting, seconds: float, rate: float | None = None) -> Point:
        """`rate`: of an open loop, requests a second."""
        begin = perf_counter() + _LEAD_SECONDS
        start = begin + _WARM_SHARE * seconds
        end = start + seconds
        steal = Steal()
        shares = filter(None, shared(setting.clients, self._processes))
        tasks = [
            Work(
                self._addresses[setting.transport],
                self._request,
                share,
                begin,
                end,
                self._arrivals(rate, share / setting.clients, begin, end),
            )
            for share in shares
        ]
        times = Times.joined(self._pool.map(work, tasks, chunksize=1))
        return Point.of(setting, times, rate=rate, span=(start, end), steal=steal.share())

    def _arrivals(self, rate: float | None, share: float, begin: float, end: float) -> Array | None:
        """Poisson arrivals split at random are Poisson arrivals."""
        return None if rate is None else poisson(self._rng, rate * share, begin, end)


def shared(clients: int, processes: int) -> list[int]:
    """So many clients for each process."""
    return [clients // processes + (index < clients % processes) for index in range(processes)]


def split(cores: set[int]) -> tuple[set[int], set[int]]:
    """Those of the service, and those of the clients, one for each process; a single one is both's.

    A client that waits without sleeping must not be where the service wakes up: that would be the
    scheduler's time slices, milliseconds, and not the service's latency.
    """
    count = min(max(len(cores) // 2, 1), _MOST_PROCESSES)
    clients = set(sorted(cores)[-count:])
    return cores - clients or cores, clients


def main(device: str, rounds: int, seconds: float) -> None:
    own, others = split(os.sched_getaffinity(0))
    os.sched_setaffinity(0, own)
    processes, spawn = len(others), multiprocessing.get_context("spawn")
    all_ready = spawn.Barrier(processes + 1)
    with (
        TemporaryDirectory(prefix="matmuld-") as folder,
        spawn.Pool(processes, be_ready, (all_ready, others)) as pool,
    ):
        all_ready.wait()
        addresses: dict[Transport, str] = {
            "tcp": f"http://127.0.0.1:{free_port()}",
            "unix": f"unix:{folder}/matmuld",
        }
        listen = [word for address in addresses.values() for word in ("--listen", address)]
        with child(device, *listen) as client:
            weight = client.put(layer().weight, pinned=True)
            bias = client.put(layer().bias, pinned=True)
            body = forward_body(layer(), weight.handle, bias.handle)
            request = post_request("/v1/linear/forward", MSGPACK, body)
            told = {"device": client.info()["engine"], "processes": processes}
            print(json.dumps(told), flush=True)
            laboratory = Laboratory(pool, processes, addresses, request)
            measure_all(laboratory, rounds, seconds)


def measure_all(laboratory: Laboratory, rounds: int, seconds: float) -> None:
    """Print every point once a round."""
    closed = []
    for _ in range(rounds):
        for clients in CLIENTS:
            for transport in TRANSPORTS:
                closed.append(laboratory.measure(Setting(transport, "closed", clients), seconds))
                print(closed[-1].model_dump_json(), flush=True)
    rates = {transport: capacity(closed, transport) for transport in TRANSPORTS}
    for _ in range(rounds):
        for load in LOADS:
            for transport in TRANSPORTS:
                setting = Setting(transport, "open", CONNECTIONS, load)
                point = laboratory.measure(setting, seconds, load * rates[transport])
                print(point.model_dump_json(), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except Failure as error:
        sys.exit(f"matmuld: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
