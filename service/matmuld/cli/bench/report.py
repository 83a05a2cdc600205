"""The results of `matmuld bench http` for people: a table and a chart."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .results import ECHO_FACTOR, SIZES, Bar, HttpResults, Product, Server, Transport

LABELS: dict[Server, str] = {
    "numpy": "NumPy alone",
    "asgi": "ASGI echo",
    "fastapi": "FastAPI echo",
    "product": "ASGI product",
    "matmuld": "matmuld",
    "sdk": "matmuld SDK",
}
_PRODUCTS: dict[Product, str] = {
    "served": "(ASGI product - echo)",
    "alone": "NumPy alone",
}
_MARKERS: dict[Product, str] = {"served": "|", "alone": "x"}
_COLORS: dict[Transport, str] = {"direct": "0.6", "tcp": "tab:blue", "unix": "tab:orange"}
_OFFSETS: dict[Transport, float] = {"direct": 0.0, "tcp": -0.2, "unix": 0.2}


def render(results: HttpResults) -> Group:
    """The medians, cell by cell, and by how much the bars are held or missed."""
    title = f"µs a request, the medians of {results.rounds} rounds of {results.seconds:g} s"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("size", "over", "server"):
        table.add_column(name, no_wrap=True)
    for name in ("mean", "p50", "p90", "p99", "÷ echo", "÷ product"):
        table.add_column(name, justify="right", no_wrap=True)
    p50 = {latency.cell: latency.p50_us for latency in results.summary}
    for _, section in groupby(results.summary, lambda latency: (latency.size, latency.transport)):
        for latency in section:
            bare = [p50.get(latency.cell._replace(server=server)) for server in ("asgi", "product")]
            figures = (latency.mean_us, latency.p50_us, latency.p90_us, latency.p99_us)
            table.add_row(
                str(latency.size),
                latency.transport,
                LABELS[latency.server],
                *(f"{us:.1f}" for us in figures),
                *(f"{latency.p50_us / us:.2f}" if us else "" for us in bare),
            )
        table.add_section()
    return Group(table, *map(_sentence, results.bars))


def _sentence(bar: Bar) -> Text:
    over = bar.p50_us - bar.limit_us
    verdict = (
        f"{'held' if bar.holds else 'missed'} by {abs(over):.1f} ({abs(over) / bar.limit_us:.0%})"
    )
    return Text(
        f"{bar.size} over {bar.transport}: p50 {bar.p50_us:.1f}, "
        f"{_limit(bar.product)} is {bar.limit_us:.1f}: {verdict}",
        style="green" if bar.holds else "red",
    )


def _limit(product: Product) -> str:
    return f"{ECHO_FACTOR} · echo + {_PRODUCTS[product]}"


def draw(results: HttpResults, path: Path) -> None:
    """A chart of p50, with a line up to p90, and marks where the bars of `matmuld` are."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 3 * len(SIZES)), layout="constrained")
    rows = list(LABELS)
    for axes, size in zip(figure.subplots(len(SIZES)), SIZES, strict=True):
        for latency in results.summary:
            if latency.size == size:
                height = rows.index(latency.server) + _OFFSETS[latency.transport]
                axes.barh(height, latency.p50_us, 0.36, color=_COLORS[latency.transport])
                axes.hlines(height, latency.p50_us, latency.p90_us, "0.3", linewidth=1)
        for bar in results.bars:
            if bar.size == size:
                height = rows.index("matmuld") + _OFFSETS[bar.transport]
                axes.plot(bar.limit_us, height, _MARKERS[bar.product], color="k", markersize=8)
        axes.set_title(f"one float32 row, {size} → {size}, bias and ReLU", loc="left")
        axes.set_yticks(range(len(rows)), LABELS.values())
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("µs a request, p50 and a line up to p90")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[
            *(Patch(color=color, label=transport) for transport, color in _COLORS.items()),
            *(
                Line2D([], [], color="k", marker=marker, linestyle="", label=_limit(product))
                for product, marker in _MARKERS.items()
            ),
        ],
        loc="outside upper right",
        ncols=5,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
