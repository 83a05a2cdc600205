"""One request at work: its operands, its products, and the delivery of its results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from matmuld_client.wire import DTYPE_NAMES, Buffer, is_row_major

from .engine.elementwise import assign, copyable, empty_like
from .engine.epilogs import Epilog
from .engine.protocol import Array, Engine, Operands
from .engine.signature import Options, Signature
from .memory.tensors import Kind, Resident, TensorStore
from .operands import Operand, Sources
from .pool import PlanPool
from .scheduler import Scheduler
from .schemas import Into, Placement
from .store import Choices

Way = Callable[["Call", Any], Awaitable[None]]
"""Does a step, on a call."""

Results = dict[str, "Result | list[Results]"]
"""The results of an operation by name; a stack's layers are a list of such maps."""


Reply = tuple[dict[str, Any], list[np.ndarray[Any, Any]]]
"""The header of a reply, and the arrays of its payloads, on the host."""


@dataclass(slots=True)
class Timing:
    """Seconds that a request spent, by phase."""

    queue: float = 0.0
    plan: float = 0.0
    compute: float = 0.0
    copy: float = 0.0


class Tunable(Protocol):
    """A step on arrays, with several ways to do it: a NamedTuple of `strategies`."""

    @property
    def options(self) -> Options: ...

    @property
    def ways(self) -> dict[str, Way]:
        """By name; the first is taken until another is known to be better."""

    @property
    def outputs(self) -> dict[str, Array]:
        """The numbers that are written; of masks a bit may differ where z is near 0."""

    def _asdict(self) -> dict[str, Any]: ...

    @property
    def _replace(self) -> Callable[..., Any]: ...


class Chooser(Protocol):
    """Knows the best way to do a step.

    Attributes:
        generation: counts changes of its mind.
    """

    generation: int

    async def way(self, step: Tunable) -> str:
        """The name of the way to do `step` now."""


class FirstWay:
    """Has no opinion."""

    generation = 0

    async def way(self, step: Tunable) -> str:
        return next(iter(step.ways))


@dataclass(slots=True)
class Runtime:
    """What all requests share.

    Attributes:
        deterministic: whether every result is to have the same bits every time.
        scheduler: the requests that there are.
    """

    engine: Engine
    pool: PlanPool
    store: TensorStore
    choices: Choices
    tuner: Chooser = field(default_factory=FirstWay)
    deterministic: bool = False
    scheduler: Scheduler = field(default_factory=Scheduler)


@dataclass(slots=True)
class Result:
    """An output on the device, and where it is to go. `parts`: the arrays that make up a tape."""

    value: Any
    placement: Placement = "payload"
    kind: Kind = "tensor"
    rows: int | None = None
    weight: str | None = None
    parts: Sequence[Array] | None = None
    target: Resident | None = None

    @property
    def arrays(self) -> Sequence[Array]:
        return (self.value,) if self.parts is None else self.parts

    def of(self, value: Array) -> Result:
        """The same output, with another value."""
        return Result(value, self.placement, self.kind, self.rows, self.weight)

    def to(self, placement: Placement) -> Result:
        """The same output, for another place."""
        return Result(self.value, placement, self.kind, self.rows, self.weight, self.parts)


@dataclass(slots=True)
class Step:
    """An operation whose header has been checked.

    Nothing in it depends on the contents of payloads and tensors, and what a handle names never
    changes its looks, so it may be run again for every request with the same header; unless it is
    not `repeatable`, because it holds on to what a handle names.
    """

    sources: Sources
    run: Callable[[Call], Awaitable[Results]]
    repeatable: bool = True
    runs: int = 0
    generation: int = -1
    """Of the choices from which `ways` and `signatures` were derived."""
    ways: list[str] = field(default_factory=list)
    """To do its parts, in the order in which they always come."""
    signatures: list[Signature] = field(default_factory=list)
    """Of its products, likewise."""
    recording: Recording | None = None

    @property
    def worth_recording(self) -> bool:
        """Whether it has come before and could not be recorded yet."""
        if self.recording is None:
            return self.repeatable and self.runs > 0
        return self.recording.closed


class Recording(Protocol):
    """What a step does, to be done again.

    Attributes:
        closed: whether that is no longer possible.
    """

    closed: bool

    async def answer(self, body: memoryview, end: int, timing: Timing) -> list[Buffer] | None:
        """The parts of the reply to a body whose header ends at `end`, if nothing but payloads
        comes back; None if it must be done step by step.
        """

    async def replay(self, call: Call) -> Reply | None:
        """The reply to `call` if results are to be held; None if it must be done step by step."""


class Writing:
    """Holds the locks of residents, taken in one order by all, so that nobody waits in a circle."""

    __slots__ = ("_held", "_targets")

    def __init__(self, targets: Sequence[Resident]) -> None:
        self._targets = targets
        self._held: list[Resident] = []

    async def __aenter__(self) -> None:
        try:
            for target in self._targets:
                await target.lock.acquire()
                self._held.append(target)
        except BaseException:
            self._release()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        while self._held:
            self._held.pop().lock.release()


class Call:
    """A request of one tenant. `created`: what its results are held as, for the first time."""

    def __init__(self, runtime: Runtime, tenant: str, payloads: Sequence[memoryview] = ()) -> None:
        self.engine = runtime.engine
        self.store = runtime.store
        self.tenant = tenant
        self.timing = Timing()
        self._pool = runtime.pool
        self._tuner = runtime.tuner
        self._ways: list[str] = []
        self._parts = 0
        self.payloads = payloads
        self._residents: list[tuple[Resident, int]] = []
        self._held: list[Any] = []
        self._signatures: list[Signature] = []
        self._products = 0
        self.created: list[Resident] = []

    async def perform(self, step: Step) -> Reply:
        """Run `step` on this call's payloads.

        Raises:
            Malformed, InvalidOperands: they are not those that the header describes.
            Gone: a tensor is no longer held.
        """
        if step.recording is not None:
            reply = await step.recording.replay(self)
            if reply is not None:
                return reply
        step.runs += 1
        if step.generation != self._tuner.generation:
            step.generation, step.ways, step.signatures = self._tuner.generation, [], []
        self._ways, self._signatures = step.ways, step.signatures
        consumed = [self._resident(operand) for operand in step.sources.consumed]
        async with self.writing(step.sources.targets, consumed):
            self.bind(step.sources)
            reply = await self.deliver(await step.run(self))
            for tape in consumed:
                self.store.free(tape)
        return reply

    def bind(self, sources: Sources) -> None:
        """Take hold of the operands, of every tensor the version that it has now."""
        sources.check(self.payloads)
        for operand in sources.operands:
            if operand.handle is None:
                self._held.append(None)
            else:
                resident = self._resident(operand)
                self._residents.append((resident, resident.version))
                self._held.append(operand.held(resident))

    def _resident(self, operand: Operand) -> Resident:
        assert operand.handle is not None
        return self.store.get(self.tenant, operand.handle, operand.name)

    def feed(self, operand: Operand, value: Any) -> None:
        """What an earlier step of a program gives for an operand; None: it is not read again."""
        self._held[operand.index] = value

    def tape(self, operand: Operand) -> Any:
        """A bound tape."""
        return self._held[operand.index]

    async def load(self, operand: Operand) -> Array:
        """A bound operand as an array on the device. Raises OutOfMemory."""
        held = self._held[operand.index]
        if held is not None:
            return operand.view(self.engine, held)
        data = operand.data if operand.payload is None else self.payloads[operand.payload]
        if data is None:
            return operand.arrange(self.engine, self.engine.empty((operand.extent,), operand.dtype))
        began = perf_counter()
        flat = await self.engine.borrow(np.frombuffer(data, operand.dtype))
        self.timing.copy += perf_counter() - began
        return operand.arrange(self.engine, flat)

    async def choose(self, step: Tunable) -> None:
        """Do a step, in whatever way is best."""
        index, self._parts = self._parts, self._parts + 1
        if index == len(self._ways):
            way = await self._tuner.way(step)
            if index == len(self._ways):
                self._ways.append(way)
        await step.ways[self._ways[index]](self, step)

    async def run(self, operands: Operands, epilog: Epilog, options: Options) -> None:
        """Start ``d = epilog(alpha · a @ b + beta · c)``; planned first if it must be. Raises
        OutOfMemory.
        """
        began = perf_counter()
        signature = self._signature(operands, epilog, options)
        async with self._pool.lease(signature, operands, self.tenant) as plan:
            planned = perf_counter()
            await self.engine.run(plan, operands)
        done = perf_counter()
        self.timing.plan += planned - began
        self.timing.compute += done - planned

    def _signature(self, operands: Operands, epilog: Epilog, options: Options) -> Signature:
        """The key of the step's next product: how its operands lie is the same each time."""
        if self._products == len(self._signatures):
            self._signatures.append(self.engine.signature(operands, epilog, options))
        self._products += 1
        return self._signatures[self._products - 1]

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return self.engine.empty(shape, dtype)

    async def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        array = self.engine.empty(shape, dtype)
        await self.compute(array.nbytes, copyable(array).fill, 0)
        return array

    async def compute(self, nbytes: int, function: Callable[..., None], *args: Any) -> None:
        """Run an elementwise step over `nbytes` bytes."""
        began = perf_counter()
        await self.engine.call(nbytes, function, *args)
        self.timing.compute += perf_counter() - began

    def target(self, into: Into) -> Resident:
        """The tensor that an output goes into. Raises Gone if it is no longer held."""
        return self.store.get(self.tenant, into.tensor, "outputs")

    def writing(self, targets: Iterable[Into], consumed: Iterable[Resident] = ()) -> Writing:
        """Keep others from the tensors that outputs go into, and from tapes that are used up, for
        an ``async with``.
        """
        held = {held.handle: held for held in (*map(self.target, targets), *consumed)}
        return Writing([held[handle] for handle in sorted(held)])

    async def deliver(self, results: Results) -> Reply:
        """Put every result in its place: all of them or, if anything fails, none."""
        leaves = list(leaves_of(results))
        began = perf_counter()
        fetched = [leaf for leaf in leaves if leaf.placement == "payload"]
        payloads: list[np.ndarray[Any, Any]] = []
        copying = 0.0
        if fetched:
            payloads, copying = await self.engine.download([leaf.value for leaf in fetched])
        else:
            await self.engine.synchronize()
        self.timing.copy += copying
        self.timing.compute += perf_counter() - began - copying
        if len(fetched) < len(leaves):
            await self._lay_out(leaves)
            self._check_places(leaves)
        return self.header(results), payloads

    def undo(self) -> None:
        """Free the handles that the reply would have told, for there is nobody to tell."""
        for resident in self.created:
            self.store.free(resident)

    async def _lay_out(self, leaves: Sequence[Result]) -> None:
        """Give results the layout of the tensors that they go into, whose views stay right."""
        for leaf in leaves:
            if isinstance(leaf.placement, Into):
                held = self.target(leaf.placement).value
                leaf.value = await laid_out_as(self.engine, held, leaf.value)

    def _check_places(self, leaves: Sequence[Result]) -> None:
        """Raise unless every result can be placed; nothing runs between this and the placing."""
        arrays = [array for leaf in leaves if leaf.placement == "tensor" for array in leaf.arrays]
        self.store.check(self.tenant, self.store.fresh(self.tenant, arrays))
        for leaf in leaves:
            if isinstance(leaf.placement, Into):
                leaf.target = self.target(leaf.placement)

    def header(self, results: Results) -> dict[str, Any]:
        """The header of the reply; what is to be held is held from now on."""
        return self._header(results, count())

    def _header(self, results: Results, payloads: Iterator[int]) -> dict[str, Any]:
        header: dict[str, Any] = {}
        for name, result in results.items():
            if isinstance(result, list):
                header[name] = [self._header(part, payloads) for part in result]
            else:
                header[name] = self._place(result, payloads)
        return header

    def _place(self, result: Result, payloads: Iterator[int]) -> dict[str, Any]:
        described = {} if result.kind == "tape" else describe(result.value)
        if result.placement == "payload":
            described["payload"] = next(payloads)
            if result.kind != "tensor":
                described["kind"] = result.kind
            return described
        if result.placement == "tensor":
            resident = self.store.add(
                self.tenant,
                result.value,
                kind=result.kind,
                arrays=result.arrays,
                rows=result.rows,
                weight=result.weight,
            )
            self.created.append(resident)
        else:
            assert result.target is not None
            resident = result.target
            self.store.replace(resident, result.value)
        return {**described, "tensor": resident.handle, "kind": resident.kind}


def leaves_of(results: Results) -> Iterator[Result]:
    return (result for _, result in paths_of(results))


def paths_of(results: Results, within: str = "") -> Iterator[tuple[str, Result]]:
    """Every result and what it is called, such as ``layers[1].dbias``."""
    for name, result in results.items():
        if isinstance(result, list):
            for index, part in enumerate(result):
                yield from paths_of(part, f"{within}{name}[{index}].")
        else:
            yield within + name, result


async def laid_out_as(engine: Engine, like: Array, array: Array) -> Array:
    """`array` with the layout of `like`, which is row- or column-major."""
    if array.strides == like.strides or array.flags.c_contiguous == like.flags.c_contiguous:
        return array
    copy = empty_like(engine, like)
    await engine.call(2 * array.nbytes, assign, copy, array)
    return copy


def describe(array: Array) -> dict[str, Any]:
    """A tensor of a reply's header, without its source."""
    shape = list(array.shape)
    described: dict[str, Any] = {"dtype": DTYPE_NAMES[array.dtype], "shape": shape}
    if not array.flags.c_contiguous:
        strides = [stride // array.itemsize for stride in array.strides]
        if not is_row_major(shape, strides):
            described["strides"] = strides
    return described
