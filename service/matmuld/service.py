"""The parts of a running service, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from time import monotonic
from typing import Any

from matmuld_client.wire import PAYLOAD_LIMIT

from . import __version__
from .calls import Call, Runtime, Step
from .engine import open_engine
from .memory.handles import HandleMint
from .memory.tensors import TensorStore
from .operands import FLOATS, Inputs
from .pool import PlanPool
from .recordings import Recorder, Recordings
from .settings import Settings
from .steps import Steps

log = logging.getLogger("matmuld")

TENANT = "default"
"""Until tenants are configured there is one."""


class Service:
    """Engine, pool and store, and what is known about them."""

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self.settings = settings
        self.runtime = runtime
        self.steps = Steps()
        self.recordings = Recordings(runtime.pool, settings.recording_bytes)
        self._started = monotonic()

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[Service]:
        """A service on the running loop; everything it holds is freed at the end."""
        engine = open_engine(settings.device, settings.memory_limit)
        quota = settings.tenant_bytes
        if quota is None:
            quota = int(engine.memory().total * 0.8)
        store = TensorStore(HandleMint(), quota, settings.ttl_s)
        pool = PlanPool(engine, settings.plans, settings.plan_bytes)
        service = cls(settings, Runtime(engine, pool, store))
        log.info("device %s, epoch %s", engine.describe(), store.mint.epoch)
        janitor = asyncio.create_task(service._sweep_for_ever())
        try:
            yield service
        finally:
            janitor.cancel()
            with suppress(asyncio.CancelledError):
                await janitor
            service.recordings.clear()
            store.clear()
            await pool.close()
            engine.close()

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
        return Inputs(self.runtime.store, tenant, payload_limit)

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
            "dtypes": list(FLOATS),
            "limits": {
                "body_bytes": settings.body_limit,
                "tenant_bytes": store.quota,
                "ttl_s": settings.ttl_s,
                "plans": settings.plans,
                "plan_bytes": settings.plan_bytes,
            },
            "memory": {f"{name}_bytes": nbytes for name, nbytes in memory._asdict().items()},
            "tensors": {"count": len(store), "nbytes": store.nbytes, "expired": store.expired},
            "plans": self.pool_stats(),
        }
