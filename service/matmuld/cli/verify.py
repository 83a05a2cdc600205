"""`matmuld verify`: every dtype and epilog on a device, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from itertools import chain, product
from time import monotonic
from typing import Literal, NamedTuple, get_args

import numpy as np
from matmuld_client import Client, MatmuldError, TransportError
from matmuld_client.operations import Float8
from pydantic import BaseModel, Field, model_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..settings import Address, Device, Mode
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
AUTOTUNE_SECONDS = 0.001
"""Of each comparison: which way is the fastest is not asked here, but whether it is right."""
Part = Literal["products", "layers"]
PARTS: tuple[Part, ...] = get_args(Part)


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
    only: Part | None = Field(None, description="a part of it: single products, or layers")
    autotune: Mode | None = Field(None, description="that of the service that is started")
    strategy: list[str] = Field(
        [], description="way that the service that is started takes where it can; may be repeated"
    )

    @model_validator(mode="after")
    def _of_a_new_service(self) -> Verify:
        if self.url is not None and (self.autotune is not None or self.strategy):
            raise ValueError(
                "autotune, strategy: expected without url, as they are of a service that is started"
            )
        return self

    def run(self) -> int:
        console = Console()
        with self._service() as client:
            info = client.info()
            console.print(", ".join(f"{key} {value}" for key, value in info["engine"].items()))
            tuning = info["autotune"]
            strategies = ", ".join(tuning["strategies"]) or "none"
            console.print(f"autotune {tuning['mode']}, forced strategies: {strategies}")
            sizes = QUICK_SIZES if self.quick else SIZES
            report = verified(client, sizes, console, PARTS if self.only is None else (self.only,))
        report.print(console)
        return 1 if report.failures else 0

    def _service(self) -> AbstractContextManager[Client]:
        if self.url is not None:
            return Client(self.url, timeout=REQUEST_SECONDS)
        from .server import child

        flags = ["--plans", str(POOL), "--plan-store", "off"]
        if self.autotune is not None:
            flags += ["--autotune", self.autotune, "--autotune-s", str(AUTOTUNE_SECONDS)]
        for name in self.strategy:
            flags += ["--strategies", name]
        return child(self.device, *flags)


def verified(
    client: Client, sizes: Sequence[Size], console: Console, parts: Sequence[Part] = PARTS
) -> Report:
    """Everything of these sizes, or a part."""
    began = monotonic()
    paths, verdicts = Paths(client), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        groups = [group for part in parts for group in GROUPS[part](client, sizes)]
        task = progress.add_task("", total=sum(group.cases for group in groups))
        for group in groups:
            progress.update(task, description=group.name)
            for verdict in group.verdicts:
                verdicts.append(verdict)
                paths.look()
                progress.advance(task)
    return Report(verdicts, paths.counts, monotonic() - began)


def _product_groups(client: Client, sizes: Sequence[Size]) -> Iterator[Group]:
    for dtype, size, batch in product(PRECISIONS, sizes, BATCHES):
        cases = _products(client, dtype, size, batch)
        yield Group(f"{dtype} {size}", len(VARIANTS) * len(EPILOGS), cases)
    if _has_float8(client):
        for pair, result, size in product(PAIRS, RESULTS, sizes):
            cases = _float8_products(client, pair, result, size)
            yield Group(f"float8 {size}", 1 + len(FORWARD), cases)


def _layer_groups(client: Client, sizes: Sequence[Size]) -> Iterator[Group]:
    for dtype, size, batch in product(PRECISIONS, sizes, BATCHES):
        cases = _layers(client, dtype, size, batch)
        yield Group(f"{dtype} {size}", 2 * len(ACTIVATIONS), cases)
    if _has_float8(client):
        for pair, result, size in product(PAIRS, RESULTS, sizes):
            cases = _float8_layers(client, pair, result, size)
            yield Group(f"float8 {size}", len(ACTIVATIONS), cases)


GROUPS: dict[Part, Callable[[Client, Sequence[Size]], Iterator[Group]]] = {
    "products": _product_groups,
    "layers": _layer_groups,
}


def _has_float8(client: Client) -> bool:
    return set(chain(*PAIRS)) <= set(client.info()["dtypes"])


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
        case = case._replace(operation=f"stack, {activation}")
        yield judged(client, case, partial(problem.run_stack, client, activation))


def _float8_products(
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


def _float8_layers(
    client: Client, pair: tuple[Float8, Float8], result: str, size: Size
) -> Iterator[Verdict]:
    problem, variant = Float8Problem(pair, result, size), " by ".join(pair)
    with problem.resident(client) as held:
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
