"""The 8-bit products that `matmuld verify` asks for, and what they should give."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from matmuld_client import Client, RemoteTensor
from matmuld_client.operations import Float8
from matmuld_client.wire import DTYPES

from .cases import EPILOGS, Epilog, fetched
from .oracle import Activation, Array, Expected, Oracle, Outcomes, f64, positive, unpack

PAIRS: tuple[tuple[Float8, Float8], ...] = (
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float8_e4m3fn"),
)
RESULTS = ("bfloat16", "float16", "float32")
FORWARD = EPILOGS[:10]
SCALE = 0.375
"""Of A, in the request; B is quantized by the service and brings its own."""
ROUNDOFF = 2.0**-10
"""Of a sum, relative to Σ|terms|. Hopper's tensor cores align the products of a step to the largest
and cut off what is below about 13 bits; cuBLASLt adds up the steps in float32. 2.4e-4 was seen with
K = 128 on an H200, and less with more."""
HALF_STEPS = {"float8_e4m3fn": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}
"""How far rounding goes at most: relative, and among subnormal numbers."""


class Float8Problem:
    """A of one 8-bit dtype, and B to be quantized to another. GPUs multiply them in sizes that are
    multiples of 16, so that M, N and K are rounded up; but for layers, whose batch is N.
    """

    def __init__(
        self, pair: tuple[Float8, Float8], result: str, size: tuple[int, int, int]
    ) -> None:
        self._m, columns, k = (-(-extent // 16) * 16 for extent in size)
        self._batch = size[1]
        self._to = pair[1]
        self._random = np.random.default_rng(zlib.crc32(f"{pair} {result} {size}".encode()))
        self._oracle = Oracle(result)
        self._options: Any = {"result_type": result}
        self._a = self._normal(self._m, k).astype(DTYPES[pair[0]])
        self._b = self._normal(columns, k) * np.float32(k**-0.5)
        bias = "float16" if result == "float16" else "bfloat16"
        self._bias = self._normal(self._m).astype(DTYPES[bias])

    def _normal(self, *shape: int) -> Array:
        return self._random.standard_normal(shape, np.float32)

    @contextmanager
    def resident(self, client: Client) -> Iterator[RemoteTensor]:
        """Bᵀ in the service."""
        with client.put(self._b, quantize=self._to) as held:
            yield held

    def quantized(self, held: RemoteTensor) -> Outcomes:
        """What B has become, in float32."""
        assert held.scale is not None
        relative, least = HALF_STEPS[self._to]
        tolerance = (relative + 2.0**-20) * np.abs(f64(self._b)) + least * held.scale
        values = held.numpy().astype(np.float32) * np.float32(held.scale)
        return {"value": (values, Expected(f64(self._b), tolerance))}

    def product(self, client: Client, held: RemoteTensor, name: str) -> Outcomes:
        """Every output of a product, masks as 0 and 1."""
        epilog, oracle = Epilog.of(name), self._oracle
        given: dict[str, Any] = {} if name == "NONE" else {"epilog": name}
        if epilog.has_bias:
            given["bias"] = self._bias
        scales: Any = {"a": SCALE}
        answer = client.matmul(self._a, held.mT, scales=scales, options=self._options, **given)
        d, extras = answer if isinstance(answer, tuple) else (answer, {})
        z = self._pre_activation(held, has_bias=epilog.has_bias)
        outcomes = {"d": (d, oracle.rounded(oracle.activated(epilog.activation, z)))}
        for kind, aux in extras.items():
            if kind == "relu_aux":
                outcomes[kind] = (unpack(fetched(aux), self._m), positive(z))
            else:
                outcomes[kind] = (fetched(aux)[: self._m], oracle.rounded(z))
        return outcomes

    def layer(self, client: Client, held: RemoteTensor, activation: Activation) -> Outcomes:
        """A layer with A as its weight, for as many rows of Bᵀ as the size says."""
        oracle, rows = self._oracle, self._batch
        y = client.linear(
            held[:rows],
            self._a,
            self._bias,
            scales={"weight": SCALE},
            activation=activation,
            options=self._options,
        )
        z = self._pre_activation(held, has_bias=True)
        expected = oracle.rounded(oracle.activated(activation, z)).T
        return {"y": (y, Expected(expected.value[:rows], expected.tolerance[:rows]))}

    def _pre_activation(self, held: RemoteTensor, *, has_bias: bool) -> Expected:
        assert held.scale is not None
        a, b = SCALE * f64(self._a), held.scale * f64(held.numpy()).T
        z = Expected(a @ b, ROUNDOFF * (np.abs(a) @ np.abs(b)))
        return self._oracle.plus(z, f64(self._bias)[:, None]) if has_bias else z
