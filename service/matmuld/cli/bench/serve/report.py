"""The results of `matmuld bench serve` for people: a table and a chart."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .results import SIZE, TRANSPORTS, Loop, Point, ServeResults

_COLORS: dict[Loop, str] = {"closed": "tab:blue", "open": "tab:orange"}
_STYLES = {"p50": "-", "p99": "--"}


def render(results: ServeResults) -> Table:
    """Point by point, the medians of the rounds."""
    title = (
        f"one float32 row, {results.size} → {results.size}: µs a request, "
        f"the medians of {results.rounds} rounds of {results.seconds:g} s"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("over", no_wrap=True)
    for name in ("asked by", "answers/s", "p50", "p90", "p99", "p99.9", "late"):
        table.add_column(name, justify="right", no_wrap=True)
    points = sorted(results.points, key=lambda point: (point.transport, point.loop))
    for _, section in groupby(points, lambda point: (point.transport, point.loop)):
        for point in section:
            table.add_row(*_cells(point))
        table.add_section()
    return table


def _cells(point: Point) -> list[str]:
    figures = (point.p50_us, point.p90_us, point.p99_us, point.p999_us)
    clients = f"{point.clients} client{'s' if point.clients > 1 else ''}"
    return [
        point.transport,
        clients if point.load is None else f"{point.load:.0%} load",
        f"{point.throughput:.0f}",
        *(f"{us:.0f}" for us in figures),
        "" if point.late_us is None else f"{point.late_us:.0f}",
    ]


def draw(results: ServeResults, path: Path) -> None:
    """A chart of latency against throughput: p50 and p99 of both loops, over each transport."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(TRANSPORTS), sharex=True, sharey=True)
    for axes, transport in zip(panels, TRANSPORTS, strict=True):
        for loop, color in _COLORS.items():
            points = [p for p in results.points if (p.transport, p.loop) == (transport, loop)]
            throughput = [point.throughput for point in points]
            for name, style in _STYLES.items():
                us = [getattr(point, f"{name}_us") for point in points]
                label = f"{loop} loop, {name}"
                axes.plot(throughput, us, style, color=color, marker=".", label=label)
            for point in points:
                text = str(point.clients) if point.load is None else f"{point.load:.0%}"
                place = (point.throughput, point.p50_us)
                axes.annotate(
                    text, place, (3, -9), textcoords="offset points", fontsize=7, color=color
                )
        axes.set_yscale("log")
        axes.set_xlim(left=0)
        axes.set_title(f"over {transport}", loc="left")
        axes.set_xlabel("answers a second")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("µs a request")
    device = results.device.get("gpu", results.machine["cpu"])
    figure.suptitle(
        f"one float32 row, {SIZE} → {SIZE}, bias and ReLU, resident weights, on {device}: "
        "by number of clients (closed) and share of the capacity (open)",
        fontsize=10,
    )
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
