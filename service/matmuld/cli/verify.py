"""`matmuld verify`: every dtype and epilog on a device, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import chain, product
from time import monotonic
from typing import NamedTuple

import numpy as np
from matmuld_client import Client, MatmuldError, TransportError
from matmuld_client.operations import Float8
from pydantic import BaseModel, Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..settings import Address, Device
from .cases import EPILOGS, VARIANTS, Problem
from .failure import Failure
from .float8 import FORWARD, PAIRS, RESULTS, Float8Problem
from .layers import ACTIVATIONS, LayerProblem
from .oracle import PRECISIONS, Array, Expected, Outcomes, compare
from .report import Case, Paths, Report, Verdict

Size = tuple[int, int, int]

QUICK_SIZES: tuple[Size, ...] = (
    *((1, 1, 1), (1, 2, 3), (3, 2, 1), (2, 1, 3)),
    *((8, 16, 32), (65, 43, 21), (40, 50, 60)),
)
SIZES: tuple[Size, ...] = (*QUICK_SIZES, (129, 1000, 257), (1, 4096, 4096), (64, 1000, 4095))
"""M, N, K."""
BATCHES = (None, 2)
POOL = 8
"""Plans that the service may hold: those of one case, and so few that its pool is soon listed."""
REQUEST_SECONDS = 120.0


class Group(NamedTuple):
    """Cases that share their operands."""

    name: str
    cases: int
    verdicts: Iterator[Verdict]


class Verify(BaseModel):
    """Check every dtype, epilog, size and layout against an unfused float64 reference."""

    device: Device = Field("auto", description="of the service that is started")
    url: Address | None = Field(None, description="of a running service, instead of a new one")
    quick: bool = Field(False, description="small sizes only")

    def run(self) -> int:
        console = Console()
        with self._service() as client:
            engine = client.info()["engine"]
            console.print(", ".join(f"{key} {value}" for key, value in engine.items()))
            report = verified(client, QUICK_SIZES if self.quick else SIZES, console)
        report.print(console)
        return 1 if report.failures else 0

    def _service(self) -> AbstractContextManager[Client]:
        if self.url is not None:
            return Client(self.url, timeout=REQUEST_SECONDS)
        from .server import child

        return child(self.device, "--plans", str(POOL))


def verified(client: Client, sizes: Sequence[Size], console: Console) -> Report:
    """Everything of these sizes."""
    began = monotonic()
    paths, verdicts = Paths(client), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        groups = list(_groups(client, sizes))
        task = progress.add_task("", total=sum(group.cases for group in groups))
        for group in groups:
            progress.update(task, description=group.name)
            for verdict in group.verdicts:
                verdicts.append(verdict)
                paths.look()
                progress.advance(task)
    return Report(verdicts, paths.counts, monotonic() - began)


def _groups(client: Client, sizes: Sequence[Size]) -> Iterator[Group]:
    each = len(VARIANTS) * len(EPILOGS) + len(ACTIVATIONS)
    for dtype, size, batch in product(PRECISIONS, sizes, BATCHES):
        cases = chain(_products(client, dtype, size, batch), _layers(client, dtype, size, batch))
        yield Group(f"{dtype} {size}", each, cases)
    if set(chain(*PAIRS)) <= set(client.info()["dtypes"]):
        each = 1 + len(FORWARD) + len(ACTIVATIONS)
        for pair, result, size in product(PAIRS, RESULTS, sizes):
            yield Group(f"float8 {size}", each, _float8(client, pair, result, size))


def _products(client: Client, dtype: str, size: Size, batch: int | None) -> Iterator[Verdict]:
    problem = Problem(dtype, size, batch)
    expected = cache(problem.expected)
    for variant in VARIANTS:
        with problem.resident(client, variant) as operands:
            for epilog in EPILOGS:
                case = Case(dtype, epilog, size, batch, str(variant))
                run = partial(problem.run, client, operands, epilog, variant.has_c)
                wanted = expected(epilog, variant.has_c)
                yield judged(client, case, partial(_paired, run, wanted))


def _paired(run: Callable[[], dict[str, Array]], wanted: dict[str, Expected]) -> Outcomes:
    got, nothing = run(), np.empty(0)
    return {name: (got.get(name, nothing), wanted[name]) for name in wanted}


def _layers(client: Client, dtype: str, size: Size, batch: int | None) -> Iterator[Verdict]:
    problem = LayerProblem(dtype, size, batch)
    for activation in ACTIVATIONS:
        case = Case(dtype, f"linear, {activation}", size, batch, "forward and backward")
        yield judged(client, case, partial(problem.run, client, activation))


def _float8(
    client: Client, pair: tuple[Float8, Float8], result: str, size: Size
) -> Iterator[Verdict]:
    """Of 8-bit operands, under the dtype of their results."""
    problem, variant = Float8Problem(pair, result, size), " by ".join(pair)
    with problem.resident(client) as held:
        case = Case("float32", "float8, quantize", size, None, variant)
        yield judged(client, case, partial(problem.quantized, held))
        for epilog in FORWARD:
            case = Case(result, f"float8 {epilog}", size, None, variant)
            yield judged(client, case, partial(problem.product, client, held, epilog))
        for activation in ACTIVATIONS:
            case = Case(result, f"float8 linear, {activation}", size, None, variant)
            yield judged(client, case, partial(problem.layer, client, held, activation))


def judged(client: Client, case: Case, outcomes: Callable[[], Outcomes]) -> Verdict:
    """Whether all outputs are right; the worst of them, or why there is none."""
    try:
        compared = {name: compare(*pair, case.dtype) for name, pair in outcomes().items()}
    except MatmuldError as error:
        if isinstance(error, TransportError) and not client.live():
            raise Failure(f"the service is gone; {case} was the last it was asked for") from error
        return Verdict(case, math.inf, f"{type(error).__name__}: {error}")
    name, worst = max(compared.items(), key=lambda item: item[1].ratio)
    return Verdict(case, worst.ratio, f"{name}: {worst.detail}")
