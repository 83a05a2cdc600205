"""The demo's image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .training import History

FORWARD, BACKWARD, MUTED = "#2a6f97", "#d1495b", "#8a8a8a"


def draw(history: History, path: Path) -> None:
    """Loss by step, accuracy by epoch and the latency of requests, as one PNG."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, latency = figure.subplots(1, 3)
    loss.semilogy(history.loss, color=FORWARD, linewidth=0.8)
    loss.set(title="training loss", xlabel="step", ylabel="cross-entropy")
    epochs = np.arange(1, len(history.accuracy) + 1)
    accuracy.plot(epochs, np.multiply(history.accuracy, 100), color=FORWARD)
    accuracy.set(title=f"test accuracy: {history.accuracy[-1]:.1%}", xlabel="epoch", ylabel="%")
    for name, seconds, color in (
        ("forward", history.forward, FORWARD),
        ("backward and update", history.backward, BACKWARD),
    ):
        share = np.arange(1, len(seconds) + 1) / len(seconds) * 100
        latency.semilogx(np.sort(seconds) * 1e3, share, color=color, label=name)
    latency.axhline(50, color=MUTED, linewidth=0.6, linestyle=":")
    latency.axhline(99, color=MUTED, linewidth=0.6, linestyle=":")
    latency.set(title="latency of a request", xlabel="ms", ylabel="% of requests within")
    latency.legend(frameon=False)
    for axes in (loss, accuracy, latency):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=120)
