"""Planned products of cuBLASLt: planned by nvmath's `Matmul`, launched by its binding.

`Matmul.execute` allocates D and the auxiliary outputs and records an event on each call; the
binding on the planned object's descriptors takes any output pointers and costs a fifth of the host
time. The attributes used here are not documented, so nvmath-python is pinned to one version. The
only module that imports nvmath.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from ctypes import string_at
from dataclasses import replace
from typing import Any

import cupy
import numpy as np
import nvmath
from cupy.cuda.memory import OutOfMemoryError
from cupy.cuda.runtime import CUDARuntimeError
from nvmath.bindings import cublasLt as cublaslt
from nvmath.linalg._internal.matrix_layout_ifc import MatrixLayoutInterface
from nvmath.linalg.advanced import (
    Matmul,
    MatmulEpilog,
    MatmulNumericalImplFlags,
    MatmulOptions,
    MatmulPlanPreferences,
)
from nvmath.linalg.advanced import MatmulReductionScheme as ReductionScheme

from .agreement import difference, poison, tolerance
from .epilogs import TABLE, Epilog
from .float8 import MULTIPLE, is_float8
from .protocol import Array, Disagreement, Launch, Operands
from .signature import Signature

NVMATH_VERSION = "1.0.0"
ALIGNMENT = 256
CANDIDATES = 8
"""Algorithms asked of the heuristic; the first that really runs is kept."""
ALGORITHM_BYTES = 64
HOST_BYTES = 32 << 10
"""Host memory of one planned Matmul, about."""

multiply = cublaslt.matmul

_QUIET = logging.getLogger("matmuld.nvmath")
_QUIET.setLevel(logging.ERROR)


class Unsupported(Exception):
    """cuBLASLt has no algorithm for this product as it lies."""


_REFUSALS = (ValueError, RuntimeError, cublaslt.cuBLASLtError)
"""What nvmath raises for what cannot be planned; a fault of the device is a RuntimeError too."""


def _refusal(error: Exception) -> Exception:
    return error if isinstance(error, CUDARuntimeError) else Unsupported(str(error))


class Launcher:
    """A stream to launch on, with one workspace for all products on it."""

    def __init__(self, handle: int, stream: Any, workspace_bytes: int) -> None:
        self.handle = handle
        self.stream = stream
        self.workspace_bytes = workspace_bytes
        self.one = cupy.asarray(np.ones(1, np.float32))
        self._workspace = cupy.cuda.Memory(workspace_bytes)
        self.workspace = self._workspace.ptr


class FusedPlan:
    """One planned `Matmul`, whose C and D have one layout.

    Attributes:
        refusal: why the record that it was to be made from is not used; None if it is.
    """

    path = "fused"
    nbytes = HOST_BYTES
    brief = True

    def __init__(
        self,
        signature: Signature,
        operands: Operands,
        main: Launcher,
        planning: Launcher,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Plan on the stream of `planning`, where the candidates are also tried; runs go to `main`.

        The algorithm is that of `record`, of an earlier plan of the signature, if it still runs and
        agrees on `operands` with the heuristic's.

        Raises:
            Unsupported: there is no algorithm.
        """
        self._main = main
        self._planning = planning
        self.refusal: str | None = None
        self._restored = False
        self._signature = signature
        self._row = TABLE[signature.epilog]
        self._is_scaled = is_float8(operands.a.dtype)
        self._ragged = self._is_scaled and signature.d.shape[-1] % MULTIPLE != 0
        b, d = operands.b, operands.d
        try:
            self._matmul = matmul = Matmul(
                operands.a,
                rounded_up(b) if self._ragged else b,
                rounded_up(d) if self._ragged else d,
                beta=0.0,
                options=_options(signature, main),
                stream=planning.stream,
                quantization_scales={"a": main.one, "b": main.one} if self._is_scaled else None,
            )
        except _REFUSALS as error:
            raise _refusal(error) from error
        try:
            matmul.plan(
                preferences=_preferences(signature),
                epilog=_epilog(signature.epilog),
                epilog_inputs=self._epilog_inputs(operands),
                stream=planning.stream,
            )
            self._keep(matmul, operands)
            self._algorithm = self._first_that_runs(operands)
            if record is not None:
                self._restore(record, operands)
        except _REFUSALS as error:
            matmul.free()
            raise _refusal(error) from error
        except BaseException:
            matmul.free()
            raise
        matmul.release_operands()

    def _epilog_inputs(self, operands: Operands) -> dict[str, Any] | None:
        inputs = {}
        if self._row.bias:
            inputs["bias"] = operands.vector
        if self._row.aux_in is not None:
            inputs[self._row.aux_in] = operands.aux
        return inputs or None

    def _keep(self, matmul: Any, operands: Operands) -> None:
        self._algorithms = matmul.algorithms_buffer
        self._descriptor = matmul.mm_desc
        self._layouts = (
            matmul.a_layout_ptr,
            matmul.b_layout_ptr,
            matmul.c_layout_ptr,
            matmul.d_layout_ptr,
        )
        self._alpha, self._beta = matmul.alpha, matmul.beta
        self._scalars = matmul.alpha.ctypes.data, matmul.beta.ctypes.data
        self._set_vector = matmul.mm_desc_ifc.set_bias_pointer_unchecked
        self._set_aux = matmul.mm_desc_ifc.set_epilogue_aux_pointer_unchecked
        self._set_scale_a = matmul.mm_desc_ifc.set_a_scale_pointer_unchecked
        self._set_scale_b = matmul.mm_desc_ifc.set_b_scale_pointer_unchecked
        if self._ragged:
            self._algorithms = self._for_columns(operands.d.shape[-1])

    def _for_columns(self, columns: int) -> Any:
        """Algorithms for `columns` columns of B and D instead of those planned for."""
        _, b_layout, _, d_layout = self._layouts
        for layout in (b_layout, d_layout):
            MatrixLayoutInterface(layout).cols = columns
        found, count = cublaslt.MatmulHeuristicResult(CANDIDATES), np.zeros(1, np.int32)
        cublaslt.matmul_algo_get_heuristic(
            self._main.handle,
            self._descriptor,
            *self._layouts,
            self._matmul.preference_ptr,
            CANDIDATES,
            found.ptr,
            count.ctypes.data,
        )
        if not count[0]:
            raise RuntimeError(f"no algorithm for {columns} columns")
        return found[: count[0]]

    def _first_that_runs(self, operands: Operands) -> int:
        """Try the candidates on the planning stream; this also loads the kernels."""
        self._untried = self._candidates()
        while self._untried:
            algorithm = self._untried.pop(0)
            if self._runs(operands, algorithm):
                return algorithm
        raise RuntimeError("none of the heuristic's algorithms runs")

    def _candidates(self) -> list[int]:
        """Addresses of the algorithms that the workspace suffices for."""
        return [
            int(result["algo"].ctypes.data)
            for result in self._algorithms
            if int(result["workspace_size"].item()) <= self._planning.workspace_bytes
        ]

    def _runs(self, operands: Operands, algorithm: int) -> bool:
        try:
            self._bind(operands, self._planning, algorithm)()
        except cublaslt.cuBLASLtError:
            return False
        self._planning.stream.synchronize()
        return True

    def variants(self, operands: Operands) -> list[Launch]:
        if self._restored:
            return []
        self._untried = [a for a in self._untried if self._runs(operands, a)]
        algorithms = [self._algorithm, *self._untried]
        return [self._bind(operands, self._planning, algorithm) for algorithm in algorithms]

    def take(self, index: int, operands: Operands) -> None:
        algorithm = self._untried[index - 1]
        try:
            self._compare(algorithm, operands)
        except Unsupported as error:
            raise Disagreement(f"{self._signature.describe()}: {error}") from None
        self._algorithm = algorithm

    def _restore(self, record: Mapping[str, Any], operands: Operands) -> None:
        """Take the algorithm of `record`, or say in `refusal` why not."""
        if record["algorithm"] == self._opaque:
            self._restored = True
            return
        kept = np.zeros(1, cublaslt.matmul_heuristic_result_dtype)
        algorithm = int(kept["algo"].ctypes.data)
        try:
            kept["algo"] = np.frombuffer(record["algorithm"], cublaslt.matmul_algo_dtype)
            needed, recorded = self._workspace_bytes(algorithm), record["workspace_bytes"]
            most = self._planning.workspace_bytes
            if needed != recorded or needed > most:
                raise Unsupported(
                    f"its workspace: expected {recorded} bytes, at most {most}, got {needed}"
                )
            self._compare(algorithm, operands)
        except (Unsupported, ValueError, cublaslt.cuBLASLtError, OutOfMemoryError) as error:
            self.refusal = str(error)
        else:
            self._algorithm, self._algorithms, self._restored = algorithm, kept, True

    def _workspace_bytes(self, algorithm: int) -> int:
        """What an algorithm needs for this product.

        Raises:
            Unsupported, cuBLASLtError: it cannot do it.
        """
        found = np.zeros(1, cublaslt.matmul_heuristic_result_dtype)
        cublaslt.matmul_algo_check(
            self._main.handle, self._descriptor, *self._layouts, algorithm, found.ctypes.data
        )
        if state := int(found["state"][0]):
            raise Unsupported(f"cuBLASLt's check of the algorithm: expected status 0, got {state}")
        return int(found["workspace_size"][0])

    def _compare(self, algorithm: int, operands: Operands) -> None:
        """Raises Unsupported if `algorithm` gives another result than the present one. Without C,
        which may be D.
        """
        on, signature = self._planning, self._signature
        trial = replace(operands, c=None, alpha=1.0, beta=0.0)
        outputs = self._outputs(trial)
        self._bind(trial, on, self._algorithm)()
        expected = {name: array.copy(order="K") for name, array in outputs.items()}
        for array in outputs.values():
            poison(array)
        self._bind(trial, on, algorithm)()
        found = {name: difference(cupy, expected[name], array) for name, array in outputs.items()}
        allowed = tolerance(signature.a.dtype, signature.d.dtype, signature.options)
        for name, apart in found.items():
            if not apart <= allowed:
                raise Unsupported(
                    f"its {name}: expected the heuristic's within {allowed:.0e} of the largest "
                    f"element, got {apart:.1e}"
                )

    def _outputs(self, operands: Operands) -> dict[str, Array]:
        """All numbers that a run writes. A bit of relu_aux may differ where z is near 0."""
        outputs = {"d": operands.d}
        if self._row.gradient is not None:
            outputs["bias gradient"] = operands.vector
        if self._row.aux_out == "gelu_aux":
            assert operands.aux is not None
            outputs["gelu_aux"] = operands.aux[..., : operands.d.shape[-2], :]
        return outputs

    @property
    def _opaque(self) -> bytes:
        """The algorithm as cuBLASLt has it."""
        return string_at(self._algorithm, ALGORITHM_BYTES)

    def record(self) -> tuple[str, dict[str, Any]] | None:
        """None if cuBLASLt's own check does not let the algorithm pass."""
        try:
            needed = self._workspace_bytes(self._algorithm)
        except (Unsupported, cublaslt.cuBLASLtError):
            return None
        record = {"algorithm": self._opaque, "workspace_bytes": needed}
        return self._signature.text, record

    def bind(self, operands: Operands, *, aside: bool = False) -> Launch:
        return self._bind(operands, self._planning if aside else self._main, self._algorithm)

    def _bind(self, operands: Operands, on: Launcher, algorithm: int) -> Launch:
        """The descriptor belongs to all launches of the plan: each sets its own pointers."""
        o = operands
        alpha, beta = self._alpha, self._beta
        d = o.d.data.ptr
        a_layout, b_layout, c_layout, d_layout = self._layouts
        arguments = (
            on.handle,
            self._descriptor,
            self._scalars[0],
            o.a.data.ptr,
            a_layout,
            o.b.data.ptr,
            b_layout,
            self._scalars[1],
            d if o.c is None else o.c.data.ptr,
            c_layout,
            d,
            d_layout,
            algorithm,
            on.workspace,
            on.workspace_bytes,
            on.stream.ptr,
        )
        vector = None if o.vector is None else o.vector.data.ptr
        aux = None if o.aux is None else o.aux.data.ptr
        scale_a, scale_b = (on.one if s is None else s for s in (o.scale_a, o.scale_b))
        scales = (scale_a.data.ptr, scale_b.data.ptr) if self._is_scaled else None

        def launch() -> None:
            alpha[0] = o.alpha
            beta[0] = o.beta
            if vector is not None:
                self._set_vector(vector)
            if aux is not None:
                self._set_aux(aux)
            if scales is not None:
                self._set_scale_a(scales[0])
                self._set_scale_b(scales[1])
            multiply(*arguments)

        return launch

    def execute_beside(self, operands: Operands, d: Array) -> dict[str, Array]:
        """The same product into `d`, by nvmath's `execute` and the same algorithm; the auxiliary
        outputs.
        """
        matmul, on, o = self._matmul, self._planning, operands
        addresses = [int(result["algo"].ctypes.data) for result in self._algorithms]
        algorithm = matmul.algorithms[addresses.index(self._algorithm)]
        inputs, stream = self._epilog_inputs(o), on.stream
        matmul.reset_operands(
            a=o.a, b=o.b, c=d, alpha=1.0, beta=0.0, epilog_inputs=inputs, stream=stream
        )
        _, extras = matmul.execute(algorithm=algorithm, stream=stream)
        matmul.release_operands()
        return dict(extras)

    def close(self) -> None:
        self._matmul.free()


def rounded_up(matrix: Array) -> Array:
    """A column-major matrix that claims to have as many columns as nvmath wants of 8-bit operands.
    cuBLASLt itself takes any number, so that the plan is then made for the true one.
    """
    rows, columns = matrix.shape
    leading = matrix.strides[1] if columns > 1 else rows * matrix.itemsize
    shape = rows, -(-columns // MULTIPLE) * MULTIPLE
    return cupy.ndarray(shape, matrix.dtype, matrix.data, (matrix.itemsize, leading))


def check_version() -> None:
    """Refuse another nvmath than the one whose inside this module knows."""
    if nvmath.__version__ != NVMATH_VERSION:
        raise RuntimeError(
            f"matmuld needs nvmath-python {NVMATH_VERSION}, {nvmath.__version__} is installed"
        )


def version() -> int:
    """cuBLASLt's version, such as 130100."""
    return int(cublaslt.get_version())


def create_handle() -> int:
    return int(cublaslt.create())


def destroy_handle(handle: int) -> None:
    cublaslt.destroy(handle)


def _options(signature: Signature, launcher: Launcher) -> MatmulOptions:
    """Fast accumulation exists for 8-bit types only; cuBLASLt refuses it with others."""
    options = signature.options
    return MatmulOptions(
        inplace=True,
        compute_type=nvmath.linalg.ComputeType[options.compute_type],
        sm_count_target=options.sm_count_target,
        fast_accumulation=options.fast_accumulation and signature.a.dtype.startswith("float8"),
        handle=launcher.handle,
        memory_limit=launcher.workspace_bytes,
        logger=_QUIET,
    )


def _preferences(signature: Signature) -> MatmulPlanPreferences:
    """Partial sums of a 16-bit D are added up in the compute type unless the caller allows more:
    with all reduction schemes, bfloat16 [40, 60] by [60, 50] was off by 41 roundings (H200).
    """
    options = signature.options
    reduction = options.reduction_scheme_mask
    if options.deterministic:
        reduction = ReductionScheme.NONE
    elif reduction is None and signature.d.dtype in ("float16", "bfloat16"):
        reduction = ReductionScheme.COMPUTE_TYPE
    implementations = options.numerical_impl_mask
    return MatmulPlanPreferences(
        reduction_scheme_mask=reduction,
        numerical_impl_mask=(
            MatmulNumericalImplFlags.ALL if implementations is None else implementations
        ),
        limit=CANDIDATES,
    )


def _epilog(epilog: Epilog) -> Any:
    return None if epilog is Epilog.NONE else MatmulEpilog[epilog.value]
