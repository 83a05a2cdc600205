"""What all sections measure with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType

import numpy as np

from ...failure import Failure
from .device import Array, Gpu, check
from .inprocess import Matmuld
from .pytorch import MISSING, PyTorch, open_pytorch
from .section import MATMULD, Section
from .served import Service, serving
from .stopwatch import Budget, Samples, interleaved
from .work import Work, Works


class Lab:
    """The GPU, and matmuld, PyTorch and a service on it; for a ``with``."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device = device
        self.rounds = rounds

    def __enter__(self) -> Lab:
        self._stack = ExitStack()
        try:
            self.matmuld = Matmuld(self.device)
        except RuntimeError as error:
            raise Failure(str(error)) from error
        self._stack.callback(self.matmuld.close)
        self.gpu = Gpu()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @cached_property
    def pytorch(self) -> PyTorch | None:
        """None where it is not installed."""
        return open_pytorch(self.gpu)

    @cached_property
    def service(self) -> Service:
        """Started when it is first needed, and stopped at the end."""
        return self._stack.enter_context(
            serving(self.device, "--autotune", "eager", "--plan-store", "off")
        )

    def with_pytorch(self, section: Section) -> PyTorch | None:
        """PyTorch; if it is missing, the section says so."""
        if self.pytorch is None and MISSING not in section.notes:
            section.notes.append(MISSING)
        return self.pytorch

    def right(
        self, section: Section, case: str, works: Mapping[str, Work], expected: Sequence[Array]
    ) -> Works:
        """Those whose answer is right; of others the section tells.

        Outputs are spoilt once they are checked, or the next work that writes to them might do
        nothing and be found right. Raises Failure if matmuld's answer is wrong.
        """
        kept: Works = {}
        for name, work in works.items():
            work.run()
            self.gpu.stream.synchronize()
            try:
                check(name, work.outputs(), expected)
            except Failure as error:
                if name.startswith(MATMULD):
                    raise Failure(f"{case}, {error}") from error
                section.notes.append(f"{case}, {error}")
            else:
                kept[name] = work
            for output in work.outputs():
                output.fill(np.nan)
        return kept

    def gpu_samples(self, works: Works, budget: Budget) -> Samples:
        """What the GPU takes for each."""
        subjects = {name: lambda run=work.run: self.gpu.gpu_us(run) for name, work in works.items()}
        return interleaved(subjects, self.rounds, budget)

    def clear(self) -> None:
        """Give back the memory of a case."""
        self.matmuld.forget()
        if self.pytorch is not None:
            self.pytorch.trim()
        self.gpu.trim()
