"""matmuld in this process: its operations on its engine, without HTTP.

All that the benchmark knows of the inside of the service is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from statistics import median
from time import perf_counter_ns
from typing import Any, TypeVar

from ....calls import Call, Reply, Results, Runtime, Tunable
from ....engine import open_engine
from ....engine.protocol import Array
from ....memory.handles import HandleMint
from ....memory.tensors import Kind, TensorStore
from ....operands import Inputs
from ....operations import OPERATIONS
from ....pool import PlanPool
from ....recordings import Recorder, Recordings
from ....schemas import Into
from ....store import InMemoryChoices
from ....tuner import Tuner
from .work import Work

T = TypeVar("T")

_TENANT = "bench"
_PLANS, _PLAN_BYTES, _TTL_S = 1024, 1 << 30, 86_400.0
_RECORDING_BYTES = 1 << 28
_AUTOTUNE_S = 0.25
_CALLS = 50


class Matmuld:
    """An engine, a pool and a store. The current stream of this thread is then the engine's."""

    def __init__(self, device: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = open_engine(device)
        quota = self._engine.memory().total
        self._pool = PlanPool(self._engine, _PLANS, _PLAN_BYTES)
        self._store = TensorStore(HandleMint(), quota, _TTL_S)
        self._engine.choices = choices = InMemoryChoices()
        self.runtime = Runtime(self._engine, self._pool, self._store, choices)
        self.runtime.tuner = tuner = Tuner(self.runtime, "eager", _AUTOTUNE_S)
        self.recordings = Recordings(self._pool, tuner, _RECORDING_BYTES)

    def describe(self) -> dict[str, Any]:
        """The device and the versions of the libraries in use."""
        return self._engine.describe()

    def hold(self, array: Array, kind: Kind = "tensor") -> str:
        """The handle of an array, which is not copied."""
        return self._store.add(_TENANT, array, kind=kind).handle

    def step(self, step: Tunable, *names: str) -> Work:
        """A step on arrays, in the way that was measured to be the fastest, for those fields."""

        def run() -> None:
            self.wait(Call(self.runtime, _TENANT).choose(step))

        return Work(run, lambda: [getattr(step, name) for name in names])

    def operation(self, name: str, header: dict[str, Any]) -> Operation:
        """An operation by its path and its header, whose operands are held."""
        return Operation(self, name, header)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def forget(self) -> None:
        """Free all that is held, and every plan."""
        self.wait(self._engine.synchronize())
        self.recordings.clear()
        self._store.clear()
        self._pool.evict()

    def close(self) -> None:
        self.recordings.clear()
        self._store.clear()
        self.wait(self._pool.close())
        self._engine.close()
        self._loop.close()


class _Launched(Call):
    """A call that is over once everything is launched; its results are put into their tensors."""

    results: Results

    async def deliver(self, results: Results) -> Reply:
        self.results = results
        for result in results.values():
            if not isinstance(result, list) and isinstance(result.placement, Into):
                self.store.replace(self.target(result.placement), result.value)
        return {}, []


class Operation:
    """An operation of the service that is done again and again, as if its header came each time:
    the second time it is recorded.
    """

    def __init__(self, matmuld: Matmuld, name: str, header: dict[str, Any]) -> None:
        self._matmuld = matmuld
        kind, check = OPERATIONS[name]
        inputs = Inputs(matmuld.runtime.store, _TENANT)
        self._step = check(inputs, kind.model_validate(header))
        self._results: Results = {}

    async def launch(self) -> None:
        runtime = self._matmuld.runtime
        if self._step.worth_recording:
            await Recorder(self._matmuld.recordings, runtime, _TENANT).perform(self._step)
        call = _Launched(runtime, _TENANT)
        await call.perform(self._step)
        self._results = call.results

    def run(self) -> None:
        """Launch it, from outside of the event loop."""
        self._matmuld.wait(self.launch())

    def output(self, name: str) -> Array:
        """What the last launch gave under that name."""
        result = self._results[name]
        assert not isinstance(result, list)
        return result.value

    def work(self, *names: str) -> Work:
        return Work(self.run, lambda: [self.output(name) for name in names])

    def host_us(self) -> float:
        """What the host takes from the operation to its launched products, as on the event loop of
        the service: the median of some calls in a row.
        """
        return self._matmuld.wait(self._host_us())

    async def _host_us(self) -> float:
        engine, took = self._matmuld.runtime.engine, []
        await engine.synchronize()
        for _ in range(_CALLS):
            began = perf_counter_ns()
            await self.launch()
            took.append(perf_counter_ns() - began)
        await engine.synchronize()
        return median(took) / 1e3
