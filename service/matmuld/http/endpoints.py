"""Endpoints: ASGI callables that decode, run and reply; a failure becomes a problem document."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from time import perf_counter

from matmuld_client.errors import DeadlineExceeded, Internal, RequestError
from matmuld_client.wire import MSGPACK, OCTETS
from starlette.types import Receive, Scope, Send

from ..calls import Timing
from ..operations import OPERATIONS
from ..scheduler import USUAL
from ..service import TENANT, Service
from .exchange import Disconnected, Exchange

log = logging.getLogger("matmuld")

Answer = Callable[[Service, Exchange], Awaitable[None]]


class Endpoint:
    """An ASGI application for one method of one path."""

    def __init__(self, service: Callable[[], Service], answer: Answer) -> None:
        self._service = service
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service()
        scheduler = service.runtime.scheduler
        scheduler.active += 1
        scheduler.served += 1
        exchange = Exchange(scope, receive, send, service.settings.body_limit, TENANT)
        try:
            await self._answer(service, exchange)
        except Disconnected:
            log.info("request %s: the client went away", exchange.request_id)
        except Exception as error:
            await _refuse(service, exchange, error)
        finally:
            scheduler.active -= 1


async def _refuse(service: Service, exchange: Exchange, error: Exception) -> None:
    """Answer with the problem that an error is for the caller.

    Not inside the handler: a name for the error there, which its traceback leads back to, would
    keep the request's arrays until the next garbage collection.
    """
    problem = error if isinstance(error, RequestError) else service.runtime.engine.explain(error)
    if problem is None:
        problem = Internal("a fault of the service; its log has the request id")
    if problem.status >= 500 and not isinstance(problem, DeadlineExceeded):
        trace = None if problem is error else error
        text = "request %s: %s: %s"
        log.error(text, exchange.request_id, problem.code, problem.detail, exc_info=trace)
    if exchange.started:
        raise error
    await exchange.problem(problem)


def operation(name: str) -> Answer:
    """The endpoint of an operation: decode and check, unless the header is known; run, reply."""
    model, check = OPERATIONS[name]

    async def answer(service: Service, exchange: Exchange) -> None:
        exchange.check_body()
        scheduler, tenant = service.runtime.scheduler, exchange.tenant
        urgency = USUAL
        if exchange.deadline or exchange.priority:
            urgency = exchange.urgency()
            scheduler.foresee(tenant, urgency)
        with scheduler.admit(exchange.length or 0) as place:
            if exchange.length is None:
                exchange.grown = place.grow
            body = memoryview(await exchange.body())
            began = perf_counter()
            if not place.start(urgency) and not await exchange.wait_for(
                place.queue(tenant, urgency)
            ):
                raise place.late()
            packed = exchange.content_type == MSGPACK
            known = service.steps.find(name, tenant, body) if packed else None
            if known is None:
                header, payloads, end = exchange.understand(model, body)
                step = check(service.inputs(tenant, exchange.payload_limit), header)
                if packed:
                    service.steps.keep(name, tenant, body, end, step)
            else:
                step, end = known
                if (recording := step.recording) is not None:
                    exchange.timing = timing = Timing()
                    parts = await recording.answer(body, end, timing)
                    if parts is not None:
                        timing.queue = perf_counter() - began - timing.compute - timing.copy
                        place.finish()
                        await exchange.reply_parts(parts)
                        return
                payloads = exchange.payloads(body, end)
            call = service.call(tenant, payloads, step)
            exchange.timing = timing = call.timing
            reply = await call.perform(step)
            spent = timing.plan + timing.compute + timing.copy
            timing.queue = max(perf_counter() - began - spent, 0.0)
            place.finish()
            if call.created and await exchange.is_abandoned():
                call.undo()
                raise Disconnected
            del call  # and with it what it holds on the device, while the client takes its time
            await exchange.reply(*reply)

    answer.__doc__ = check.__doc__
    return answer


def upload(answer: Answer) -> Answer:
    """An endpoint to which tensors are sent; a raw body is never held, and counts as nothing."""

    async def admitted(service: Service, exchange: Exchange) -> None:
        nbytes = 0
        if exchange.content_type != OCTETS:
            exchange.check_body()
            nbytes = exchange.length or 0
        with service.runtime.scheduler.admit(nbytes) as place:
            exchange.grown = place.grow
            await answer(service, exchange)

    admitted.__doc__ = answer.__doc__
    return admitted
