"""Products planned by nvmath, started by its `execute` or by the bare binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import nvmath
from nvmath.bindings import cublasLt as cublaslt
from nvmath.linalg.advanced import (
    Matmul,
    MatmulEpilog,
    MatmulOptions,
    MatmulPlanPreferences,
    MatmulReductionScheme,
)

from .device import Array, Gpu

_WORKSPACE_BYTES = 32 << 20
_CANDIDATES = 8

UNSUPPORTED = (ValueError, RuntimeError, cublaslt.cuBLASLtError)
"""What planning raises where cuBLASLt has no algorithm."""


class Product:
    """``d = epilog(a @ b)``. `vector` is the bias or the bias gradient, `aux` the mask.

    The planner's own algorithm is first, unless it is tuned. Without a `d`, `execute` allocates one
    each time, as it does by itself, and the bare launch is not to be had.
    """

    def __init__(
        self,
        gpu: Gpu,
        a: Array,
        b: Array,
        d: Array | None = None,
        epilog: str | None = None,
        *,
        vector: Array | None = None,
        aux: Array | None = None,
    ) -> None:
        self._gpu = gpu
        self._operands = a, b, d
        self._vector, self._aux = vector, aux
        self.inputs = _epilog_inputs(epilog, vector, aux)
        self.matmul: Any = Matmul(
            a,
            b,
            d,
            beta=None if d is None else 0.0,
            options=MatmulOptions(
                inplace=d is not None,
                compute_type=nvmath.linalg.ComputeType.COMPUTE_32F,
                memory_limit=_WORKSPACE_BYTES,
            ),
            stream=gpu.stream,
        )
        try:
            self.matmul.plan(
                preferences=MatmulPlanPreferences(
                    reduction_scheme_mask=MatmulReductionScheme.COMPUTE_TYPE, limit=_CANDIDATES
                ),
                epilog=None if epilog is None else MatmulEpilog[epilog],
                epilog_inputs=self.inputs or None,
                stream=gpu.stream,
            )
        except UNSUPPORTED:
            self.matmul.free()
            raise
        self._bind()

    def _bind(self) -> None:
        matmul = self.matmul
        self._workspace = cupy.cuda.alloc(_WORKSPACE_BYTES)
        self._alpha, self._beta = matmul.alpha.ctypes.data, matmul.beta.ctypes.data
        self._set_vector = matmul.mm_desc_ifc.set_bias_pointer_unchecked
        self._set_aux = matmul.mm_desc_ifc.set_epilogue_aux_pointer_unchecked
        self._algorithm = matmul.cached_best_algorithm_struct.ctypes.data

    def tuned(self) -> Product:
        """The same, with the fastest of the planner's algorithms first."""
        candidates = [entry["algo"] for entry in self.matmul.algorithms_buffer]
        took = [self._try(candidate.ctypes.data) for candidate in candidates]
        best = candidates[took.index(min(took))]
        self.matmul.cached_best_algorithm_struct = best
        self._algorithm = best.ctypes.data
        return self

    def _try(self, algorithm: int) -> float:
        """What an algorithm takes, or infinity if it does not run."""
        self._algorithm = algorithm
        try:
            self.run()
        except cublaslt.cuBLASLtError:
            return float("inf")
        return self._gpu.gpu_us(self.run)

    def run(self) -> None:
        """The bare binding on the planned object's descriptors."""
        matmul, (a, b, d) = self.matmul, self._operands
        assert d is not None
        if self._vector is not None:
            self._set_vector(self._vector.data.ptr)
        if self._aux is not None:
            self._set_aux(self._aux.data.ptr)
        cublaslt.matmul(
            matmul.handle,
            matmul.mm_desc,
            self._alpha,
            a.data.ptr,
            matmul.a_layout_ptr,
            b.data.ptr,
            matmul.b_layout_ptr,
            self._beta,
            d.data.ptr,
            matmul.c_layout_ptr,
            d.data.ptr,
            matmul.d_layout_ptr,
            self._algorithm,
            self._workspace.ptr,
            _WORKSPACE_BYTES,
            self._gpu.stream.ptr,
        )

    def execute(self) -> Any:
        """nvmath's own way; D, or D and what goes with it."""
        return self.matmul.execute()

    def resetting(self, *, checked: bool) -> Callable[[], Any]:
        """The same with all operands given anew, each time."""
        reset = self.matmul.reset_operands if checked else self.matmul.reset_operands_unchecked
        operands: dict[str, Any] = {"a": self._operands[0], "b": self._operands[1]}
        if self.inputs:
            operands["epilog_inputs"] = self.inputs

        def execute() -> Any:
            reset(**operands)
            return self.execute()

        return execute

    def close(self) -> None:
        self.matmul.free()


def _epilog_inputs(epilog: str | None, vector: Array | None, aux: Array | None) -> dict[str, Any]:
    words = (epilog or "").split("_")
    inputs = {}
    if "BIAS" in words:
        inputs["bias"] = vector
    if "DRELU" in words:
        inputs["relu_aux"] = aux
    return inputs
