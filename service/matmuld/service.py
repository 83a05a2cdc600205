"""The parts of a running service, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from matmuld_client.errors import RequestError
from matmuld_client.wire import PAYLOAD_LIMIT

from . import __version__
from .calls import Call, Runtime, Step
from .engine import open_engine
from .engine.protocol import Engine
from .memory.handles import HandleMint
from .memory.tensors import TensorStore
from .operands import FACTORS, FLOATS, Inputs
from .operations.warm import rehearse
from .pool import PlanPool
from .recordings import Recorder, Recordings
from .scheduler import Scheduler
from .settings import Mode, Settings
from .steps import Steps
from .store import Choices, InMemoryChoices, PlanStore
from .strategies import NAMES
from .tuner import Tuner

log = logging.getLogger("matmuld")

TENANT = "default"
"""Until tenants are configured there is one."""


class Service:
    """Engine, pool and store, and what is known about them."""

    def __init__(self, settings: Settings, runtime: Runtime, tuner: Tuner) -> None:
        self.settings = settings
        self.runtime = runtime
        self.tuner = tuner
        self.steps = Steps()
        self.recordings = Recordings(runtime.pool, tuner, settings.recording_bytes)
        self._started = monotonic()
        self._warming: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[Service]:
        """A service on the running loop; everything it holds is freed at the end.

        Raises:
            RuntimeError: the device is missing, or a strategy is unknown.
        """
        for name in settings.strategies:
            if name not in NAMES:
                raise RuntimeError(f"strategies: expected {', '.join(NAMES)}, got {name!r}")
        engine = open_engine(
            settings.device, settings.memory_limit, lean_launch=settings.lean_launch
        )
        quota = settings.tenant_bytes
        if quota is None:
            quota = int(engine.memory().total * 0.8)
        store = TensorStore(HandleMint(), quota, settings.ttl_s)
        pool = PlanPool(engine, settings.plans, settings.plan_bytes)
        choices = _open_choices(settings.plan_store, engine)
        engine.choices = choices
        runtime = Runtime(
            engine,
            pool,
            store,
            choices,
            deterministic=settings.deterministic,
            scheduler=Scheduler(
                settings.concurrency or _concurrency(engine),
                settings.queue_requests,
                settings.queue_bytes,
            ),
        )
        tuner = Tuner(runtime, _mode(settings, engine), settings.autotune_s, settings.strategies)
        runtime.tuner = tuner
        service = cls(settings, runtime, tuner)
        engine.reclaim = service._reclaim
        log.info("device %s, epoch %s", engine.describe(), store.mint.epoch)
        janitor = asyncio.create_task(service._sweep_for_ever())
        try:
            yield service
        finally:
            for task in filter(None, (janitor, service._warming)):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await tuner.close()
            service.recordings.clear()
            store.clear()
            await pool.close()
            engine.close()

    def _reclaim(self) -> bool:
        """Free recordings and idle plans; whether there were any."""
        recorded = len(self.recordings)
        self.recordings.clear()
        return bool(recorded + self.runtime.pool.evict())

    async def _sweep_for_ever(self) -> None:
        """Free what has expired; give back to the device what was freed in whatever way."""
        store, freed = self.runtime.store, 0
        while True:
            await asyncio.sleep(self.settings.janitor_s)
            store.sweep()
            if store.freed != freed:
                freed = store.freed
                await self.runtime.engine.trim()

    def inputs(self, tenant: str, payload_limit: int = PAYLOAD_LIMIT) -> Inputs:
        """The tensors of a header of `tenant`'s, whose reply's payloads are limited so."""
        runtime = self.runtime
        return Inputs(runtime.store, tenant, payload_limit, deterministic=runtime.deterministic)

    def start(self, steps: Sequence[Step]) -> None:
        """Rehearse `steps`; the service is `starting` until that is done."""
        self._warming = asyncio.create_task(self._warm(steps))
        self.runtime.scheduler.active += 1
        self._warming.add_done_callback(self._warmed)

    def _warmed(self, warming: asyncio.Task[None]) -> None:
        self.runtime.scheduler.active -= 1

    @property
    def starting(self) -> bool:
        """Whether plans are being made before the service is ready."""
        return self._warming is not None and not self._warming.done()

    async def _warm(self, steps: Sequence[Step]) -> None:
        """What fails is logged and left cold: it concerns the requests that need it, if any."""
        began, stats = monotonic(), self.runtime.pool.stats
        for number, step in enumerate(steps):
            try:
                await rehearse(self.runtime, TENANT, step)
            except Exception as error:
                problem = self.runtime.engine.explain(error)
                known = problem or (error if isinstance(error, RequestError) else None)
                text = "warm: requests[%s] stays cold: %s"
                log.warning(text, number, known or error, exc_info=None if known else error)
        seconds = monotonic() - began
        log.info("warm: %s requests, %s plans, %.1f s", len(steps), stats.planned, seconds)

    def call(self, tenant: str, payloads: Sequence[memoryview], step: Step | None = None) -> Call:
        """A request of `tenant`'s; a step that comes for the second time is recorded."""
        if step is None or not step.worth_recording:
            return Call(self.runtime, tenant, payloads)
        return Recorder(self.recordings, self.runtime, tenant, payloads)

    def pool_stats(self) -> dict[str, Any]:
        """Counters of the plan pool."""
        pool = self.runtime.pool
        stats = asdict(pool.stats)
        stats["planning_seconds"] = round(stats["planning_seconds"], 6)
        return {**stats, "leased": pool.leased, "plans": len(pool), "nbytes": pool.nbytes}

    def info(self) -> dict[str, Any]:
        """Versions, device, limits and counters."""
        engine, store, settings = self.runtime.engine, self.runtime.store, self.settings
        memory = engine.memory()
        return {
            "service": "matmuld",
            "version": __version__,
            "python": platform.python_version(),
            "epoch": store.mint.epoch,
            "uptime_s": round(monotonic() - self._started, 3),
            "engine": engine.describe(),
            "dtypes": list(FACTORS if engine.has_float8 else FLOATS),
            "limits": {
                "body_bytes": settings.body_limit,
                "concurrency": self.runtime.scheduler.limit,
                "queue_requests": settings.queue_requests,
                "queue_bytes": settings.queue_bytes,
                "tenant_bytes": store.quota,
                "ttl_s": settings.ttl_s,
                "plans": settings.plans,
                "plan_bytes": settings.plan_bytes,
            },
            "memory": {f"{name}_bytes": nbytes for name, nbytes in memory._asdict().items()},
            "tensors": {"count": len(store), "nbytes": store.nbytes, "expired": store.expired},
            "plans": self.pool_stats(),
            "requests": self.runtime.scheduler.info(),
            "choices": asdict(self.runtime.choices.stats),
            "autotune": self.tuner.info(),
            "recordings": {"count": len(self.recordings), "nbytes": self.recordings.nbytes},
        }


def _open_choices(folder: Path | None, engine: Engine) -> Choices:
    """What was measured on such a device by such a version of the service."""
    if folder is None:
        return InMemoryChoices()
    return PlanStore(folder, {"matmuld": __version__, **engine.fingerprint()})


def _mode(settings: Settings, engine: Engine) -> Mode:
    """Where there is one way only, as in NumPy, there is nothing to measure unless it is asked
    for.
    """
    return settings.autotune or ("off" if engine.name == "cpu" else "lazy")


def _concurrency(engine: Engine) -> int:
    """Two for each core keep the cores busy while operands and results are handled; more would only
    wait for threads, where no priority counts. A GPU takes work ahead, and requests that are at
    work together can be joined.
    """
    return 2 * (os.cpu_count() or 1) if engine.name == "cpu" else 64
