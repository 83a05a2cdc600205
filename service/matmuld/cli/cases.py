"""The products that `matmuld verify` asks for, and what they should give."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matmuld_client import Client, RemoteTensor, TensorView
from matmuld_client.wire import DTYPES

from .oracle import (
    Activation,
    Array,
    Expected,
    Oracle,
    exact,
    f64,
    pack,
    padded_rows,
    positive,
    unpack,
)

EPILOGS = (
    *("NONE", "RELU", "GELU", "BIAS", "RELU_BIAS", "GELU_BIAS"),
    *("RELU_AUX", "RELU_AUX_BIAS", "GELU_AUX", "GELU_AUX_BIAS"),
    *("DRELU", "DRELU_BGRAD", "DGELU", "DGELU_BGRAD", "BGRADA", "BGRADB"),
)
ALPHA, BETA = -1.25, 0.75
PADDING = 8
"""Elements between the end of a row, or column, and the beginning of the next."""


class Epilog(NamedTuple):
    """What an epilog does, read off its name."""

    name: str
    activation: Activation
    slope: Activation
    has_bias: bool
    gives_aux: bool
    sums: str | None
    """Of which operand it gives the sums: d, a or b."""

    @classmethod
    def of(cls, name: str) -> Epilog:
        words = name.split("_")
        activation = words[0].lower() if words[0] in ("RELU", "GELU") else "none"
        slope = words[0][1:].lower() if words[0] in ("DRELU", "DGELU") else "none"
        sums = {"BGRAD": "d", "BGRADA": "a", "BGRADB": "b"}.get(words[-1])
        return cls(name, activation, slope, "BIAS" in words, "AUX" in words, sums)  # type: ignore[arg-type]


class Variant(NamedTuple):
    """How the operands lie in the service's memory, and whether C takes part."""

    layout: str
    offset: int
    has_c: bool = False

    def __str__(self) -> str:
        offset = f"offset {self.offset}" if self.offset else "aligned"
        return f"{self.layout}, {offset}" + (", with C" if self.has_c else "")


LAYOUTS = {
    "contiguous": (False, False),
    "B transposed": (False, True),
    "A transposed": (True, False),
}
"""Whether A and B are transposed. Those that are not contiguous are padded, too."""
VARIANTS = (
    *(Variant(layout, offset) for layout, offset in product(LAYOUTS, (0, 1))),
    Variant("contiguous", 0, has_c=True),
)


@dataclass
class Operands:
    """The operands of one problem in one variant, in the service but for the mask."""

    a: TensorView
    b: TensorView
    bias: TensorView
    relu_aux: Array
    gelu_aux: TensorView


class Problem:
    """Operands of one dtype and size, and all that can be made of them.

    A is standard normal, B is that over √K, so that pre-activations lie where activations bend.
    """

    def __init__(self, dtype: str, size: tuple[int, int, int], batch: int | None) -> None:
        self.dtype = DTYPES[dtype]
        self.m, n, k = size
        self._lead = () if batch is None else (batch,)
        self._oracle = Oracle(dtype)
        self._random = np.random.default_rng(zlib.crc32(f"{dtype} {size} {batch}".encode()))
        self.a = self._normal(self.m, k)
        self.b = self._normal(k, n, scale=k**-0.5)
        self.c = self._normal(self.m, n)
        self.bias = self._normal(self.m, 1)
        self.mask = self._random.integers(0, 2, (*self._lead, self.m, n), np.uint8)
        self.pre_activation = self._normal(self.m, n)

    def _normal(self, *shape: int, scale: float = 1.0) -> Array:
        numbers = self._random.standard_normal((*self._lead, *shape), np.float32)
        numbers *= np.float32(scale)
        return numbers.astype(self.dtype)

    @contextmanager
    def resident(self, client: Client, variant: Variant) -> Iterator[Operands]:
        """The operands in the service, as `variant` says."""
        padding = 0 if variant.layout == "contiguous" else PADDING
        a_transposed, b_transposed = LAYOUTS[variant.layout]
        rows = padded_rows("gelu_aux", self.m)
        gelu_aux = np.full((*self._lead, rows, self.mask.shape[-1]), np.nan, self.dtype)
        gelu_aux[..., : self.m, :] = self.pre_activation
        with ExitStack() as stack:

            def put(array: Array, transposed: bool, padding: int = 0) -> TensorView:
                view = place(client, array, transposed, padding, variant.offset)
                stack.enter_context(view.tensor)
                return view

            bias = put(self.bias, True)
            yield Operands(
                put(self.a, a_transposed, padding),
                put(self.b, b_transposed, padding),
                bias if self._lead else bias[:, 0],
                pack(self.mask),
                put(gelu_aux, True),
            )

    def run(self, client: Client, operands: Operands, name: str, has_c: bool) -> dict[str, Array]:
        """Every output of a product, masks as 0 and 1."""
        epilog = Epilog.of(name)
        given: dict[str, Any] = {} if name == "NONE" else {"epilog": name}
        if has_c:
            given |= {"c": self.c, "alpha": ALPHA, "beta": BETA}
        if epilog.has_bias:
            given["bias"] = operands.bias
        if epilog.slope != "none":
            kind = f"{epilog.slope}_aux"
            given[kind] = getattr(operands, kind)
        answer = client.matmul(operands.a, operands.b, **given)
        d, extras = answer if isinstance(answer, tuple) else (answer, {})
        outputs = {"d": d, **{key: fetched(value) for key, value in extras.items()}}
        if "relu_aux" in outputs:
            outputs["relu_aux"] = unpack(outputs["relu_aux"], self.m)
        if "gelu_aux" in outputs:
            outputs["gelu_aux"] = outputs["gelu_aux"][..., : self.m, :]
        return outputs

    def expected(self, name: str, has_c: bool) -> dict[str, Expected]:
        """What `run` should give."""
        epilog, oracle = Epilog.of(name), self._oracle
        z = self._product
        if has_c:
            z = oracle.plus(oracle.scaled(z, ALPHA), BETA * f64(self.c))
        if epilog.has_bias:
            z = oracle.plus(z, f64(self.bias))
        results: dict[str, Expected] = {}
        if epilog.gives_aux and epilog.activation == "relu":
            results["relu_aux"] = positive(z)
        elif epilog.gives_aux:
            results["gelu_aux"] = oracle.rounded(z)
        d = oracle.activated(epilog.activation, z)
        aux = self.mask if epilog.slope == "relu" else self.pre_activation
        results["d"] = d = oracle.rounded(oracle.times_slope(epilog.slope, d, aux))
        if epilog.sums is not None:
            terms = {"d": d, "a": exact(self.a), "b": exact(self.b)}[epilog.sums]
            total = oracle.rounded(oracle.summed(terms, -2 if epilog.sums == "b" else -1))
            shape = (*total.value.shape, 1) if self._lead else total.value.shape
            key = name.lower() if epilog.sums == "d" else f"bgrad{epilog.sums}"
            results[key] = total.reshape(*shape)
        return results

    @cached_property
    def _product(self) -> Expected:
        return self._oracle.product(exact(self.a), self.b)


def place(client: Client, array: Array, transposed: bool, padding: int, offset: int) -> TensorView:
    """`array` (…, rows, columns) within a tensor of the service; what lies around it is NaN."""
    stored = array.swapaxes(-1, -2) if transposed else array
    *outer, length = stored.shape
    padded = (*outer, length + padding)
    flat = np.full(offset + int(np.prod(padded)), np.nan, array.dtype)
    flat[offset:].reshape(padded)[..., :length] = stored
    view = client.put(flat)[offset:]
    strides = [int(np.prod(padded[axis + 1 :])) for axis in range(len(padded))]
    whole = TensorView(view.tensor, stored.shape, tuple(strides), view.offset)
    return whole.mT if transposed else whole


def fetched(result: Array | RemoteTensor) -> Array:
    """A result that may have stayed in the service."""
    if not isinstance(result, RemoteTensor):
        return result
    with result:
        return result.numpy()
