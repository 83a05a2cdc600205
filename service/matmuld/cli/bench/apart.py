"""A measurement in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from ..failure import Failure

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""BLAS reads how many threads it may have when it is loaded."""


def measured(module: str, arguments: Sequence[str], total: int, console: Console) -> list[Any]:
    """The lines of JSON, `total` of them, that a module says on one BLAS thread.

    Raises:
        Failure: it did not come to its end; it has said why.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ONE_THREAD},
    ) as process:
        assert process.stdout is not None
        lines = track(process.stdout, "measuring", total=total, console=console)
        found = [json.loads(line) for line in lines]
    if process.returncode:
        raise Failure("the measurement did not come to its end")
    return found
