"""Products by nvmath's own `execute`, for where the bare launch cannot be trusted; and whether it
can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cupy
import numpy as np

from .cublaslt import FusedPlan, Launcher, rounded_up
from .elementwise import assign
from .epilogs import Epilog
from .protocol import Array, Launch, Operands
from .signature import Options, Signature

_EXTENT = 64
"""Rows and columns of the product of the self-test."""


class ExecutedPlan(FusedPlan):
    """Relies on what nvmath documents only. Auxiliary outputs are copied to where they are wanted;
    algorithms are known by their number in nvmath's list, and not recorded.
    """

    path = "executed"

    def __init__(
        self,
        signature: Signature,
        operands: Operands,
        main: Launcher,
        planning: Launcher,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        o = operands
        self._planned = {
            name: array.strides
            for name, array in (("a", o.a), ("vector", o.vector), ("aux", o.aux))
            if array is not None
        }
        super().__init__(signature, operands, main, planning)

    def _keep(self, matmul: Any, operands: Operands) -> None:
        for name in ("b", "d"):
            array = getattr(operands, name)
            self._planned[name] = (rounded_up(array) if self._ragged else array).strides

    def _candidates(self) -> list[int]:
        return list(range(len(self._matmul.algorithms)))

    def _bind(self, operands: Operands, on: Launcher, algorithm: int) -> Launch:
        return partial(self._execute, operands, on, self._matmul.algorithms[algorithm])

    def _execute(self, o: Operands, on: Launcher, algorithm: Any) -> None:
        matmul = self._matmul
        b, d = o.b, o.d
        if self._ragged:
            b, d = _widened(b), _widened(d)
        if o.c is not None and o.c.data.ptr != d.data.ptr:
            assign(_columns(d, o.d.shape[-1]) if self._ragged else d, o.c)
        matmul.reset_operands(
            a=self._as_planned("a", o.a),
            b=self._as_planned("b", b),
            c=self._as_planned("d", d),
            alpha=o.alpha,
            beta=o.beta,
            epilog_inputs=self._inputs_as_planned(o),
            quantization_scales=self._scales(o, on),
            stream=on.stream,
        )
        result = matmul.execute(algorithm=algorithm, stream=on.stream)
        matmul.release_operands()
        extras = result[1] if isinstance(result, tuple) else {}
        for extra in extras.values():
            wanted = o.aux if self._row.aux_out is not None else o.vector
            assert wanted is not None
            assign(wanted, _columns(extra, wanted.shape[-1]) if self._ragged else extra)
        if self._ragged:
            assign(o.d, _columns(d, o.d.shape[-1]))

    def _inputs_as_planned(self, o: Operands) -> dict[str, Any] | None:
        inputs = {}
        if self._row.bias:
            inputs["bias"] = self._as_planned("vector", o.vector)
        if self._row.aux_in is not None:
            inputs[self._row.aux_in] = self._as_planned("aux", o.aux)
        return inputs or None

    def _scales(self, o: Operands, on: Launcher) -> dict[str, Any] | None:
        if not self._is_scaled:
            return None
        scales = {"a": o.scale_a, "b": o.scale_b}
        return {name: on.one if scale is None else scale for name, scale in scales.items()}

    def _as_planned(self, name: str, array: Array) -> Array:
        """With the strides that were planned for: those of extents of 1 may be others."""
        return cupy.ndarray(array.shape, array.dtype, array.data, self._planned[name])

    def record(self) -> tuple[str, dict[str, Any]] | None:
        return None


def _widened(matrix: Array) -> Array:
    """A copy with memory for as many columns as nvmath wants of 8-bit operands."""
    claimed = rounded_up(matrix)
    memory = cupy.zeros(claimed.strides[1] * claimed.shape[1], np.uint8)
    wide = cupy.ndarray(claimed.shape, matrix.dtype, memory.data, claimed.strides)
    assign(_columns(wide, matrix.shape[1]), matrix)
    return wide


def _columns(matrix: Array, count: int) -> Array:
    """The first columns."""
    shape = (*matrix.shape[:-1], count)
    return cupy.ndarray(shape, matrix.dtype, matrix.data, matrix.strides)


def fault_of_bare_launch(
    main: Launcher,
    planning: Launcher,
    sign: Callable[[Operands, Epilog, Options], Signature],
) -> str | None:
    """Why products are to be run by `execute`: what is wrong with a bare launch of a small product,
    on the thread and the stream of planning.

    Its bits must be those that `execute` gives on the same planned object by the same algorithm.
    """
    try:
        return _difference(main, planning, sign)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _difference(
    main: Launcher,
    planning: Launcher,
    sign: Callable[[Operands, Epilog, Options], Signature],
) -> str | None:
    random = np.random.default_rng(0)
    square = _EXTENT, _EXTENT

    def normal(*shape: int) -> Array:
        return cupy.asarray(random.standard_normal(shape).astype(np.float16))

    weight, x, bias = normal(*square), normal(*square), normal(_EXTENT)
    launched, executed = cupy.zeros(square, np.float16), cupy.zeros(square, np.float16)
    aux = cupy.zeros((_EXTENT, 16), np.uint8).T
    operands = Operands(weight, x.T, launched.T, vector=bias, aux=aux)
    signature = sign(operands, Epilog.RELU_AUX_BIAS, Options("COMPUTE_32F"))
    plan = FusedPlan(signature, operands, main, planning)
    try:
        launched.fill(0)
        aux.fill(0)
        plan.bind(operands, aside=True)()
        extras = plan.execute_beside(operands, executed.T)
        mask = _EXTENT // 8
        pairs = {
            "d": (launched, executed),
            "relu_aux": (aux[:mask], extras["relu_aux"][:mask]),
        }
        for name, pair in pairs.items():
            ours, theirs = (cupy.asnumpy(array) for array in pair)
            if ours.tobytes() != theirs.tobytes():
                return f"its {name} differs from that of execute"
    finally:
        plan.close()
    return None
