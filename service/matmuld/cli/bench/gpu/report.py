"""The results of `matmuld bench gpu` for people: tables for a terminal and in Markdown, a chart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .bars import Bar
from .results import GpuResults
from .section import TITLES, Row, Section

_HEADINGS = ("case", "subject", "clock", "p50", "p10 to p90", "rounds")
_BAR_HEADINGS = ("bar", "case", "figure", "limit", "")


def duration(us: float) -> str:
    """Microseconds, or milliseconds if there are many."""
    return f"{us / 1e3:.3f} ms" if us >= 1e3 else f"{us:.2f} µs"


def _cells(row: Row) -> tuple[str, ...]:
    spread = f"{duration(row.p10_us)} to {duration(row.p90_us)}"
    return row.case, row.subject, row.clock, duration(row.p50_us), spread, str(row.rounds)


def _bar_cells(bar: Bar) -> tuple[str, ...]:
    figure, limit = f"{bar.figure:.3f}{bar.unit}", f"{bar.sign} {bar.limit:g}{bar.unit}"
    return bar.what, bar.case, figure, limit, "held" if bar.holds else "missed"


def render(results: GpuResults) -> Group:
    """Every section, and at the end which bars are held."""
    parts: list[RenderableType] = []
    for section in results.sections:
        parts += _rendered(section)
    if results.bars:
        table = _table("what must hold", _BAR_HEADINGS)
        for bar in results.bars:
            table.add_row(*map(escape, _bar_cells(bar)), style="green" if bar.holds else "red")
        parts.append(table)
    return Group(*parts)


def _rendered(section: Section) -> Iterator[RenderableType]:
    if section.rows:
        table = _table(TITLES[section.name], _HEADINGS)
        for _, rows in groupby(section.rows, lambda row: (row.case, row.clock)):
            for row in rows:
                table.add_row(*map(escape, _cells(row)))
            table.add_section()
        yield table
    else:
        yield Text(TITLES[section.name], style="italic")
    yield from map(Text, map(str, section.ratios))
    yield from (Text(note, style="yellow") for note in section.notes)


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading)
    return table


def markdown(results: GpuResults) -> str:
    """The same as a document."""
    lines = ["# matmuld bench gpu", "", *_heading(results)]
    if results.bars:
        lines += ["", "## What must hold", "", *_grid(_BAR_HEADINGS, map(_bar_cells, results.bars))]
    for section in results.sections:
        lines += ["", f"## {section.name}: {TITLES[section.name]}"]
        if section.rows:
            lines += ["", *_grid(_HEADINGS, map(_cells, section.rows))]
        if section.ratios or section.notes:
            lines += ["", *(f"- {line}" for line in (*section.ratios, *section.notes))]
    return "\n".join(lines) + "\n"


def _heading(results: GpuResults) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    state = ", ".join(f"{name} {value}" for name, value in results.state.items())
    yield f"- {results.device.get('gpu', 'unknown GPU')}, {results.date}"
    if state:
        yield f"- {state}"
    yield f"- {results.machine['cpu']}, {results.machine['cores']} cores, {_system(results)}"
    yield f"- {versions}, cuBLASLt {results.device.get('cublaslt', 'unknown')}"
    yield (
        f"- medians of at most {results.rounds} rounds, subjects interleaved; clock: `gpu` is by "
        "CUDA events with the L2 cache flushed, `host` until all is launched, `wall` until the "
        "answer is there; ratios are medians of ratios, round by round"
    )


def _system(results: GpuResults) -> str:
    return str(results.machine["system"])


def _grid(headings: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield _line(headings)
    yield _line(("---",) * len(headings))
    yield from map(_line, rows)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def draw(results: GpuResults, path: Path) -> None:
    """A chart: every case of every section a line, every subject a dot on it."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    drawn = [section for section in results.sections if section.rows]
    heights = [1.6 + 0.32 * len(_lines(section)) for section in drawn]
    figure = Figure(figsize=(11, sum(heights) or 1), layout="constrained")
    if drawn:
        grid = figure.subplots(len(drawn), height_ratios=heights, squeeze=False)
        for (axes,), section in zip(grid, drawn, strict=True):
            axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
            _draw_section(axes, section)
            _scale(axes)
    figure.savefig(path, dpi=110)


def _lines(section: Section) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.case, row.clock) for row in section.rows))


def _draw_section(axes: Any, section: Section) -> None:
    lines = _lines(section)
    for subject in dict.fromkeys(row.subject for row in section.rows):
        rows = [row for row in section.rows if row.subject == subject]
        heights = [lines.index((row.case, row.clock)) for row in rows]
        spread = [
            [row.p50_us - row.p10_us for row in rows],
            [row.p90_us - row.p50_us for row in rows],
        ]
        middles = [row.p50_us for row in rows]
        axes.errorbar(middles, heights, xerr=spread, fmt="o", ms=5, alpha=0.8, label=subject)
    axes.set_title(f"{section.name}: {TITLES[section.name]}", loc="left", fontsize=10)
    axes.set_yticks(range(len(lines)), [f"{case}, {clock}" for case, clock in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axes: Any) -> None:
    """Microseconds, logarithmic."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("µs, p50 and a line from p10 to p90")
    axes.grid(axis="x", alpha=0.3)
