"""Clients at work: many connections in one process, each with one request at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing.synchronize import Barrier
from select import EPOLLIN, epoll
from time import perf_counter

import numpy as np
from matmuld_client.wire import unpack

from ...failure import Failure
from ..load import Array, Layer, Wire
from ..measure import row
from .results import SIZE, Times

_STALLED_SECONDS = 60
_SPIN_SECONDS = 0.002
"""epoll counts in milliseconds; what is nearer is waited for without sleeping."""


@dataclass(frozen=True)
class Work:
    """What one process does, until `end` by time.perf_counter, which all processes share.

    Attributes:
        arrivals: when requests are to be sent; None: when the answer before has come.
    """

    address: str
    request: list[bytes]
    connections: int
    start: float
    end: float
    arrivals: Array | None = None


def poisson(rng: np.random.Generator, rate: float, start: float, end: float) -> Array:
    """Arrivals between `start` and `end`, independent of each other, `rate` a second."""
    times = rng.uniform(start, end, rng.poisson(rate * (end - start)))
    times.sort()
    return times


@cache
def layer() -> Layer:
    """What is asked for."""
    return Layer(SIZE)


def be_ready(barrier: Barrier, cores: set[int]) -> None:
    """Load all that work needs, keep to `cores`, and wait for the other processes."""
    os.sched_setaffinity(0, cores)
    layer()
    barrier.wait()


def work(task: Work) -> Times:
    """Do it. Raises Failure if an answer is wrong or does not come."""
    with ExitStack() as stack:
        swarm = Swarm(task, stack)
        return swarm.closed() if task.arrivals is None else swarm.open(task.arrivals)


class Swarm:
    """The connections of one process; the last answer on each of them is checked."""

    def __init__(self, task: Work, stack: ExitStack) -> None:
        self._task = task
        self._wires: dict[int, Wire] = {}
        self._poll = stack.enter_context(epoll())
        for _ in range(task.connections):
            wire = stack.enter_context(Wire(task.address))
            self._wires[wire.fileno()] = wire
            self._poll.register(wire, EPOLLIN)
        self._intended: dict[int, float] = {}
        self._sent: dict[int, float] = {}
        self._last: dict[int, memoryview] = {}
        self._times: list[tuple[float, float, float]] = []

    def closed(self) -> Times:
        """Every connection asks again as soon as it is answered."""
        _wait_until(self._task.start)
        for key in self._wires:
            self._send(key, perf_counter())
        while self._intended:
            for key in self._answered(_STALLED_SECONDS):
                if (now := perf_counter()) < self._task.end:
                    self._send(key, now)
        return self._found()

    def open(self, arrivals: Array) -> Times:
        """Requests are sent when they are due, or once a connection is free for the next of them;
        either way they count from when they were due.
        """
        idle = list(self._wires)
        due: list[float] = arrivals.tolist()
        due.reverse()
        while due or self._intended:
            while due and idle and due[-1] <= perf_counter():
                self._send(idle.pop(), due.pop())
            idle += self._answered(_patience(due) if idle and due else _STALLED_SECONDS)
        return self._found()

    def _send(self, key: int, intended: float) -> None:
        self._intended[key] = intended
        self._sent[key] = perf_counter()
        self._wires[key].send(self._task.request)

    def _answered(self, timeout: float) -> Iterator[int]:
        """The connections that are answered now, or next."""
        events = self._poll.poll(timeout)
        if not events and timeout == _STALLED_SECONDS:
            raise Failure(f"no answer within {_STALLED_SECONDS} seconds")
        for key, _ in events:
            body = self._wires[key].read()
            if body is not None:
                self._times.append((self._intended.pop(key), self._sent[key], perf_counter()))
                self._last[key] = body
                yield key

    def _found(self) -> Times:
        for body in self._last.values():
            layer().check(row(unpack(body)[1][0]))
        return Times(*np.array(self._times, float).reshape(-1, 3).T)


def _patience(due: list[float]) -> float:
    """How long to sleep before the next request is due."""
    return max(due[-1] - perf_counter() - _SPIN_SECONDS, 0.0)


def _wait_until(start: float) -> None:
    while perf_counter() < start:
        pass
