"""Requests to come, run once on made-up operands, so that their plans are there when they come."""

from __future__ import annotations

from ..calls import Call, Reply, Results, Runtime, Step
from ..operands import Inputs
from ..schemas import (
    Header,
    MlpBackward,
    MlpBackwardStep,
    MlpForward,
    MlpForwardStep,
    Run,
    RunOutput,
    StepOutput,
    Tensor,
)
from . import OPERATIONS


class Rehearsal(Call):
    """A call whose tensors are described only and whose results go nowhere."""

    async def deliver(self, results: Results) -> Reply:
        await self.engine.synchronize()
        return {}, []


def prepare(runtime: Runtime, tenant: str, operation: str, header: Header) -> Step:
    """A request whose tensors are described only, checked; of a stack with a tape, the backward
    pass too.

    Raises:
        RequestError: the request itself would be refused.
    """
    step = OPERATIONS[operation][1](_inputs(runtime, tenant), header)
    if isinstance(header, MlpForward) and header.save_tape:
        return OPERATIONS["run"][1](_inputs(runtime, tenant), _with_backward(header))
    return step


def _inputs(runtime: Runtime, tenant: str) -> Inputs:
    return Inputs(runtime.store, tenant, sourceless=True, deterministic=runtime.deterministic)


def _with_backward(header: MlpForward) -> Run:
    """A stack, and all its gradients."""
    tape, y = (StepOutput(step="forward", output=output) for output in ("tape", "y"))
    backward = MlpBackward(
        tape=tape, dy=Tensor(step=y.step, output=y.output), wants=["dx", "dweight", "dbias"]
    )
    forward = header.model_copy(update={"outputs": {}})
    return Run(
        steps=[
            MlpForwardStep(name="forward", operation="mlp/forward", header=forward),
            MlpBackwardStep(name="backward", operation="mlp/backward", header=backward),
        ],
        outputs={"dx": RunOutput(step="backward", output="dx")},
    )


async def rehearse(runtime: Runtime, tenant: str, step: Step) -> None:
    """Run a prepared step for its plans alone.

    Raises:
        RequestError: whatever the request itself would raise.
    """
    await Rehearsal(runtime, tenant).perform(step)
