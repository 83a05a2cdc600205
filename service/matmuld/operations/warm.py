"""Requests to come, run once on made-up operands, so that their plans are there when they come."""

from __future__ import annotations

from ..calls import Call, Reply, Results, Runtime, Step, TapeResult
from ..operands import Inputs
from ..schemas import Header, MlpBackward, Tensor
from . import OPERATIONS, mlp


class Rehearsal(Call):
    """A call whose tensors are described only and whose results go nowhere."""

    def __init__(self, runtime: Runtime, tenant: str) -> None:
        super().__init__(runtime, tenant)
        self.tape: mlp.Tape | None = None

    async def deliver(self, results: Results, tape: TapeResult | None = None) -> Reply:
        self.tape = None if tape is None else tape.value
        await self.engine.synchronize()
        return {}, []


def prepare(runtime: Runtime, tenant: str, operation: str, header: Header) -> Step:
    """A request whose tensors are described only, checked.

    Raises:
        RequestError: the request itself would be refused.
    """
    deterministic = runtime.deterministic
    inputs = Inputs(runtime.store, tenant, sourceless=True, deterministic=deterministic)
    return OPERATIONS[operation][1](inputs, header)


async def rehearse(runtime: Runtime, tenant: str, step: Step) -> None:
    """Run a prepared step for its plans alone; of a stack with a tape, the backward pass too.

    Raises:
        RequestError: whatever the request itself would raise.
    """
    rehearsal = Rehearsal(runtime, tenant)
    await rehearsal.perform(step)
    if (tape := rehearsal.tape) is None:
        return
    dy = Tensor(dtype=tape.layers[0].x.dtype.name, shape=[*tape.lead, tape.shape[1]])
    backward = MlpBackward(tape="", dy=dy, wants=["dx", "dweight", "dbias"])
    inputs = Inputs(runtime.store, tenant, sourceless=True)
    await Rehearsal(runtime, tenant).perform(mlp.gradients(inputs, tape, backward))
