"""Recordings and what changes while they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from matmuld.calls import Call, Step, Timing
from matmuld.operations import OPERATIONS
from matmuld.recordings import Recorder
from matmuld.service import TENANT, Service
from matmuld.settings import Settings
from matmuld_client.wire import pack, unpack

X = np.arange(6, dtype=np.float32).reshape(2, 3)
EYE = np.eye(3, dtype=np.float32)


@asynccontextmanager
async def opened() -> AsyncIterator[Service]:
    settings = Settings(device="cpu", plan_store=None, autotune="off")
    async with Service.open(settings) as service:
        yield service


async def held(service: Service, array: Any) -> str:
    value = await service.runtime.engine.upload(array)
    return service.runtime.store.add(TENANT, value).handle


def forward(service: Service, weight: str, **more: Any) -> Step:
    model, check = OPERATIONS["linear/forward"]
    x = {"dtype": "float32", "shape": list(X.shape), "payload": 0}
    header = model.model_validate({"x": x, "weight": {"tensor": weight}, **more})
    return check(service.inputs(TENANT), header)


async def result(call: Call, step: Step) -> Any:
    header, payloads = await call.perform(step)
    assert header["y"]["payload"] == 0
    return payloads[0]


async def repeated(step: Step, x: Any) -> Any:
    """What the recording of `step` answers to `x`."""
    body = memoryview(b"".join(pack({}, [x.tobytes()])))
    assert step.recording is not None
    parts = await step.recording.answer(body, 1, Timing())
    assert parts is not None
    return parts


def y_of(parts: Any) -> Any:
    _, payloads = unpack(b"".join(parts))
    return np.frombuffer(payloads[0], np.float32).reshape(X.shape)


def test_a_tensor_replaced_while_a_step_is_recorded_is_not_recorded() -> None:
    async def main() -> None:
        async with opened() as service:
            store = service.runtime.store
            weight = await held(service, EYE)
            step = forward(service, weight)
            payloads = [memoryview(X.tobytes())]
            await result(service.call(TENANT, payloads, step), step)
            service.runtime.pool.evict()  # so that the next run has to wait for a plan
            call = service.call(TENANT, payloads, step)
            assert isinstance(call, Recorder)
            running = asyncio.ensure_future(result(call, step))
            await asyncio.sleep(0)
            assert not running.done()
            resident = store.get(TENANT, weight)
            store.replace(resident, await service.runtime.engine.upload(2 * EYE))
            np.testing.assert_array_equal(await running, X)
            assert step.recording is None
            for _ in range(3):
                again = await result(service.call(TENANT, payloads, step), step)
                np.testing.assert_array_equal(again, 2 * X)
            np.testing.assert_array_equal(y_of(await repeated(step, X)), 2 * X)

    asyncio.run(main())


def test_answers_are_no_views_of_what_the_next_repetition_writes() -> None:
    async def main() -> None:
        async with opened() as service:
            step = forward(service, await held(service, EYE))
            arrays = []
            for factor in (1, 2):
                payloads = [memoryview((factor * X).tobytes())]
                arrays.append(await result(service.call(TENANT, payloads, step), step))
            answers = [await repeated(step, factor * X) for factor in (3, 4, 5)]
            for factor, array in zip((1, 2), arrays, strict=True):
                np.testing.assert_array_equal(array, factor * X)
            for factor, parts in zip((3, 4, 5), answers, strict=True):
                np.testing.assert_array_equal(y_of(parts), factor * X)

    asyncio.run(main())


def test_a_plan_that_is_freed_while_a_step_is_recorded_is_not_launched_again() -> None:
    async def main() -> None:
        async with opened() as service:
            pool = service.runtime.pool
            model, check = OPERATIONS["mlp/forward"]
            weights = (np.ones((4, 3), np.float32), np.ones((3, 4), np.float32))
            layers = [{"weight": {"tensor": await held(service, weight)}} for weight in weights]
            x = {"dtype": "float32", "shape": list(X.shape), "payload": 0}
            header = model.model_validate({"x": x, "layers": layers})
            step = check(service.inputs(TENANT), header)
            payloads = [memoryview(X.tobytes())]
            await result(service.call(TENANT, payloads, step), step)
            first, second = pool
            second.in_use = True
            running = asyncio.ensure_future(result(service.call(TENANT, payloads, step), step))
            while not second.waiters:
                await asyncio.sleep(0)
            assert pool.evict(first.id) == 1
            pool.give_back(second)
            np.testing.assert_array_equal(await running, X @ weights[0].T @ weights[1].T)
            assert step.recording is None

    asyncio.run(main())
