"""What `matmuld verify` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matmuld_client import Client
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SHOWN = 40
"""Failures in the table; there may be thousands."""


class Case(NamedTuple):
    """One product, or one layer."""

    dtype: str
    operation: str
    size: tuple[int, int, int]
    batch: int | None
    variant: str

    def __str__(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.dtype} {self.operation} {self.size}{batch}, {self.variant}"


class Verdict(NamedTuple):
    """How far a case is off, as a part of what is allowed, and that in words."""

    case: Case
    ratio: float
    detail: str

    @property
    def passed(self) -> bool:
        return self.ratio <= 1.0


class Paths:
    """How products were carried out, by the pool's own account; it forgets, so look often."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.look()
        self.counts.clear()

    def look(self) -> None:
        for plan in self._client.plans()["plans"]:
            uses = plan["hits"] + 1
            self.counts[plan["path"]] += uses - self._seen.get(plan["id"], 0)
            self._seen[plan["id"]] = uses


@dataclass(frozen=True)
class Report:
    """All verdicts."""

    verdicts: Sequence[Verdict]
    paths: Mapping[str, int]
    seconds: float

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    def print(self, console: Console) -> None:
        if self.failures:
            console.print(self._failures())
        console.print(self._counts())
        ways = ", ".join(f"{count} {path}" for path, count in sorted(self.paths.items()))
        console.print(f"products: {ways}")
        failed, total = len(self.failures), len(self.verdicts)
        said = (
            f"[red]{failed} of {total} cases failed" if failed else f"[green]{total} cases passed"
        )
        console.print(f"{said}[/] in {self.seconds:.1f} s")

    def _failures(self) -> Table:
        table = Table(title=f"failures, {SHOWN} at most", title_justify="left")
        for heading in ("dtype", "operation", "M, N, K", "batch", "variant", "what is wrong"):
            table.add_column(heading)
        for case, _, detail in self.failures[:SHOWN]:
            size = ", ".join(map(str, case.size))
            batch = "" if case.batch is None else str(case.batch)
            table.add_row(
                case.dtype, case.operation, size, batch, case.variant, escape(detail), style="red"
            )
        return table

    def _counts(self) -> Table:
        table = Table(
            title="cases that passed; the worst error as a part of what is allowed",
            title_justify="left",
        )
        table.add_column("operation")
        dtypes = list(dict.fromkeys(verdict.case.dtype for verdict in self.verdicts))
        for dtype in dtypes:
            table.add_column(dtype, justify="right")
        for operation in dict.fromkeys(verdict.case.operation for verdict in self.verdicts):
            table.add_row(operation, *(self._cell(dtype, operation) for dtype in dtypes))
        return table

    def _cell(self, dtype: str, operation: str) -> str:
        found = [
            v for v in self.verdicts if v.case.dtype == dtype and v.case.operation == operation
        ]
        if not found:
            return ""
        passed, worst = sum(v.passed for v in found), max(v.ratio for v in found)
        cell = f"{passed}/{len(found)} {worst:5.2f}"
        return cell if passed == len(found) else f"[red]{cell}[/]"
