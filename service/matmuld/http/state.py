"""/v1/plans, /v1/info and /health."""

from __future__ import annotations

from matmuld_client.errors import NotFound, Starting

from ..operations.warm import rehearse
from ..schemas import Warm
from ..service import Service
from .exchange import Exchange
from .warming import prepared


async def plans(service: Service, exchange: Exchange) -> None:
    """The plans held and the ways chosen, least recently used first, and the pool's counters."""
    pool = service.runtime.pool
    described = [pool.describe(entry) for entry in pool]
    strategies = service.tuner.describe()
    await exchange.reply(
        {"plans": described, "strategies": strategies, "stats": service.pool_stats()}
    )


async def warm(service: Service, exchange: Exchange) -> None:
    """Run requests to come once, on made-up operands, so that their plans are there then."""
    header, payloads = await exchange.decode(Warm)
    service.inputs(exchange.tenant).finish().check(payloads)
    steps = [prepared(service, exchange.tenant, request) for request in header.requests]
    stats = service.runtime.pool.stats
    hits, planned = stats.hits, stats.planned
    for step in steps:
        await rehearse(service.runtime, exchange.tenant, step)
    await exchange.reply({"planned": stats.planned - planned, "hits": stats.hits - hits})


async def evict(service: Service, exchange: Exchange) -> None:
    """Free idle plans: all, or one."""
    plan_id = exchange.path.get("id")
    evicted = service.runtime.pool.evict(plan_id)
    if plan_id is not None and not evicted:
        raise NotFound(f"no idle plan {plan_id[:40]!r}")
    await exchange.reply({"evicted": evicted})


async def info(service: Service, exchange: Exchange) -> None:
    """Versions, device, limits and counters."""
    await exchange.reply(service.info())


async def live(service: Service, exchange: Exchange) -> None:
    """The process answers."""
    await exchange.reply({"status": "live"})


async def ready(service: Service, exchange: Exchange) -> None:
    """The device works, and what is to be planned before the first request is planned."""
    if service.starting:
        await exchange.problem(Starting("the plans that --warm names are being made"))
        return
    await service.runtime.engine.synchronize()
    await exchange.reply({"status": "ready"})
