"""The headers of replies as types, for the OpenAPI description; tests hold the service's replies
against them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel

from .engine.epilogs import AuxKind

Shape = list[int]


class Reply(BaseModel):
    """A map without fields that are not described."""

    model_config = ConfigDict(extra="forbid")


class Output(Reply):
    """A tensor, and where its elements are."""

    dtype: str
    shape: Shape
    strides: Shape | None = None
    kind: Literal["tensor", AuxKind] | None = None
    payload: int | None = None
    data: str | None = None
    tensor: str | None = None


class TapeOutput(Reply):
    """The handle of a tape."""

    tensor: str
    kind: Literal["tape"]


class LinearForwardReply(Reply):
    y: Output
    aux: Output | None = None


class LinearBackwardReply(Reply):
    dx: Output | None = None
    dweight: Output | None = None
    dbias: Output | None = None
    input_dbias: Output | None = None


class MlpForwardReply(Reply):
    y: Output
    tape: TapeOutput | None = None


class LayerGradients(Reply):
    dweight: Output | None = None
    dbias: Output | None = None


class MlpBackwardReply(Reply):
    dx: Output | None = None
    layers: list[LayerGradients]


class MatmulReply(Reply):
    d: Output
    relu_aux: Output | None = None
    gelu_aux: Output | None = None
    drelu_bgrad: Output | None = None
    dgelu_bgrad: Output | None = None
    bgrada: Output | None = None
    bgradb: Output | None = None


class RunReply(RootModel[dict[str, Output | TapeOutput]]):
    """The results of a program, by the names that it gave them."""


class Metadata(Reply):
    """What is told about a tensor or tape."""

    tensor: str
    kind: Literal["tensor", AuxKind, "tape"]
    dtype: str | None = None
    shape: Shape | None = None
    strides: Shape | None = None
    layers: int | None = None
    scale: float | None = None
    amax: float | None = None
    quantized_from: str | None = None
    nbytes: int
    pinned: bool
    ttl_s: float
    expires_in_s: float | None
    version: int


class Tensors(Reply):
    tensors: list[Metadata]


class Value(Reply):
    value: Output


class Plan(Reply):
    """One plan of the pool."""

    id: str
    owner: str
    epilog: str
    operands: dict[str, str]
    compute_type: str
    fast_accumulation: bool | None = None
    sm_count_target: int | None = None
    reduction_scheme_mask: int | None = None
    numerical_impl_mask: int | None = None
    deterministic: bool | None = None
    split: bool | None = None
    path: str
    flops: int
    hits: int
    nbytes: int
    planning_ms: float
    tflops: float | None = None


class Strategy(Reply):
    """How one kind of step is done, and the median times of its ways."""

    step: str
    activation: str | None = None
    kind: str | None = None
    epilog: str | None = None
    compute_type: str
    fast_accumulation: bool | None = None
    sm_count_target: int | None = None
    reduction_scheme_mask: int | None = None
    numerical_impl_mask: int | None = None
    deterministic: bool | None = None
    operands: dict[str, str]
    way: str
    settled: bool
    median_us: dict[str, float]


class PoolStats(Reply):
    hits: int
    misses: int
    planned: int
    failed: int
    evicted: int
    planning_seconds: float
    leased: int
    plans: int
    nbytes: int


class Plans(Reply):
    plans: list[Plan]
    strategies: list[Strategy]
    stats: PoolStats


class Warmed(Reply):
    planned: int
    hits: int


class Evicted(Reply):
    evicted: int


class Autotune(Reply):
    """How ways are chosen, and how many were: `settled` by measuring, `recalled` from the plan
    store; `changed` are not the first way, `failed` could not be measured.
    """

    mode: Literal["off", "lazy", "eager"]
    strategies: list[str]
    settled: int
    recalled: int
    changed: int
    failed: int
    seconds: float
    choices: int
    pending: int


class Info(Reply):
    """Versions, device, limits and counters."""

    service: str
    version: str
    python: str
    epoch: str
    uptime_s: float
    engine: dict[str, Any]
    dtypes: list[str]
    limits: dict[str, int | float]
    memory: dict[str, int]
    tensors: dict[str, int]
    plans: PoolStats
    requests: dict[str, int]
    choices: dict[str, int]
    autotune: Autotune
    recordings: dict[str, int]


class Health(Reply):
    status: str


class Problem(Reply):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    operand: str | None = None
