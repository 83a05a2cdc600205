"""/v1/run: several operations in one request, the later on results of the earlier."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from matmuld_client.errors import InvalidOperands, Malformed, RequestError

from ..calls import Call, Results, Step, paths_of
from ..operands import Inputs, Operand, Program
from ..schemas import (
    Header,
    Into,
    LinearBackward,
    LinearForward,
    Matmul,
    MlpBackward,
    MlpForward,
    Placement,
    ProgramStep,
    Run,
    RunOutput,
)
from . import linear, matmul, mlp
from .checks import place, scale_of

Operation = Callable[[Inputs, Any], Step]

STEPS: dict[str, tuple[type[Header], Operation]] = {
    "linear/forward": (LinearForward, linear.forward),
    "linear/backward": (LinearBackward, linear.backward),
    "mlp/forward": (MlpForward, mlp.forward),
    "mlp/backward": (MlpBackward, mlp.backward),
    "matmul": (Matmul, matmul.matmul),
}
"""What a step of a program can be."""


@dataclass(slots=True)
class _Part:
    """A checked step.

    Attributes:
        compute: its results, which go nowhere by themselves.
        fed: its operands that earlier steps give.
        feeds: operands of later steps, by which output of this one they are.
        results: of the program, by name: which output, and where it goes.
    """

    compute: Callable[[Call], Awaitable[Results]]
    fed: list[Operand] = field(default_factory=list)
    feeds: list[tuple[str, Operand]] = field(default_factory=list)
    results: dict[str, tuple[str, Placement]] = field(default_factory=dict)

    async def run(self, call: Call) -> Results:
        """Do it, and pass on what is needed of what it gives."""
        given = dict(paths_of(await self.compute(call)))
        for operand in self.fed:
            call.feed(operand, None)
        for output, operand in self.feeds:
            call.feed(operand, given[output].value)
        return {name: given[output].to(to) for name, (output, to) in self.results.items()}


def program(inputs: Inputs, header: Run) -> Step:
    """Steps in their order, as one: all of it is done or nothing."""
    known = inputs.program = Program(_names(header.steps))
    parts: list[_Part] = []
    repeatable = True
    for index, step in enumerate(header.steps):
        known.accumulated = dict(_accumulated(step.name, header.outputs))
        first = len(inputs.operands)
        inputs.outputs = {}
        with _named(f"steps[{index}]"):
            _refuse_outputs(step.header)
            checked = STEPS[step.operation][1](inputs, step.header)
        known.outputs.append(inputs.outputs)
        part = _Part(checked.run)
        repeatable &= checked.repeatable
        for operand in inputs.operands[first:]:
            operand.name = f"steps[{index}].{operand.name}"
            if operand.step is not None:
                source, output = operand.step
                parts[source].feeds.append((output, operand))
                part.fed.append(operand)
        parts.append(part)
    _place_results(inputs, parts, header.outputs)

    async def run(call: Call) -> Results:
        results: Results = {}
        for part in parts:
            results |= await part.run(call)
        return {name: results[name] for name in header.outputs}

    return Step(inputs.finish(), run, repeatable)


def _names(steps: Sequence[ProgramStep]) -> dict[str, int]:
    """The places of the steps by name. Raises Malformed if two have one name."""
    names: dict[str, int] = {}
    for index, step in enumerate(steps):
        if names.setdefault(step.name, index) != index:
            path = f"steps[{index}].name"
            raise Malformed(
                f"{path}: expected another than that of steps[{names[step.name]}], "
                f"got {step.name!r}",
                operand=path,
            )
    return names


@contextmanager
def _named(step: str) -> Iterator[None]:
    """Errors inside say of which step they are."""
    try:
        yield
    except RequestError as error:
        operand = step if error.operand is None else f"{step}.{error.operand}"
        raise type(error)(f"{step}.{error.detail}", operand=operand) from None


def _refuse_outputs(header: Header) -> None:
    """Where results go is for the program to say."""
    for field_name in ("outputs", "layers") if isinstance(header, MlpBackward) else ("outputs",):
        if getattr(header, field_name):
            raise Malformed(
                f"{field_name}: expected none in a step, the program's outputs say where they go",
                operand=field_name,
            )


def _accumulated(step: str, outputs: Mapping[str, RunOutput]) -> Iterator[tuple[str, Into]]:
    """The outputs of a step that are added to tensors."""
    for given in outputs.values():
        into = given.placement
        if given.step == step and isinstance(into, Into) and scale_of(into) != (1.0, 0.0):
            yield given.output, into


def _place_results(inputs: Inputs, parts: list[_Part], outputs: Mapping[str, RunOutput]) -> None:
    """Tell every part of the program's results that are its own.

    Raises:
        InvalidOperands: there is no such result, or it cannot go there. What is accumulated in a
            tensor is of no other use, as the gradient by itself is never made; and nothing is sent
            back twice.
    """
    assert inputs.program is not None
    read = {operand.step: operand.name for operand in inputs.operands if operand.step is not None}
    for name, given in outputs.items():
        path = f"outputs.{name[:64]}"
        index, looks = inputs.program.find(path, given.step, given.output)
        to = place(inputs, path, given.placement, looks)
        results = parts[index].results
        twins = {n: twin for n, (output, twin) in results.items() if output == given.output}
        users = [f"outputs.{n[:64]}" for n in twins]
        if (index, given.output) in read:
            users.append(read[index, given.output])
        if users and any(scale_of(placement) != (1.0, 0.0) for placement in (to, *twins.values())):
            raise InvalidOperands(
                f"{path}: expected a gradient that is accumulated to have no other use, "
                f"{users[0]} uses it too",
                operand=path,
            )
        if to == "payload" and "payload" in twins.values():
            raise InvalidOperands(
                f"{path}: expected an output that is sent back once, {users[0]} is the same",
                operand=path,
            )
        results[name] = given.output, to
