"""The headers of docs/protocol.md as types: checked once, on arrival, and shown in the OpenAPI
description.

They say what a header may look like; whether its operands fit together is for the operations to
say.
"""

from __future__ import annotations

from typing import Annotated, Literal

from matmuld_client.wire import DIMENSIONS_LIMIT
from pydantic import BaseModel, ConfigDict, Field

from .engine.epilogs import ACTIVATIONS, CUBLASLT, AuxKind
from .engine.float8 import FLOAT8

Shape = Annotated[list[int], Field(max_length=DIMENSIONS_LIMIT)]
Want = Literal["dx", "dweight", "dbias"]


class Header(BaseModel):
    """A map without unknown fields; nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Tensor(Header):
    """A tensor: what it looks like, and where its elements are (`payload`, `data`, `tensor`, or
    `step` with `output`).
    """

    dtype: str | None = None
    shape: Shape | None = None
    strides: Shape | None = Field(default=None, description="in elements; row-major if absent")
    offset: int = Field(default=0, description="in elements; into a tensor that the service holds")
    kind: Literal["tensor", AuxKind] | None = None
    payload: int | None = Field(default=None, description="index of a payload of this body")
    data: str | None = Field(default=None, description="base64, in JSON bodies")
    tensor: str | None = Field(default=None, description="a handle")
    step: str | None = Field(default=None, description="an earlier step, in /v1/run")
    output: str | None = Field(default=None, description="of that step")


class StepOutput(Header):
    """An output of an earlier step, in /v1/run."""

    step: str
    output: str


class Into(Header):
    """The output becomes the contents of a tensor; of a gradient, ``alpha · gradient + beta ·
    tensor``.
    """

    tensor: str
    alpha: float = 1.0
    beta: float = 0.0


Placement = Literal["payload", "tensor"] | Into
Scale = Annotated[
    float | Tensor,
    Field(description="of an 8-bit operand: a number, or a float32 tensor of shape [] or [1]"),
]


class Options(Header):
    """The planner's options, by nvmath's names."""

    compute_type: str | None = None
    result_type: str | None = None
    fast_accumulation: bool = False
    sm_count_target: int = Field(default=0, ge=0, le=1 << 20)
    reduction_scheme_mask: int | None = Field(default=None, ge=0, lt=1 << 32)
    numerical_impl_mask: int | None = Field(default=None, ge=0, lt=1 << 64)
    deterministic: bool = Field(default=False, description="the same bits every time")


class LinearForward(Header):
    """``y = activation(alpha · x·weightᵀ + beta · c + bias)``"""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    c: Tensor | None = None
    scales: dict[Literal["x", "weight"], Scale] = {}
    alpha: float = 1.0
    beta: float | None = None
    activation: str = Field(default="none", examples=list(ACTIVATIONS))
    save_aux: bool = False
    options: Options = Options()
    outputs: dict[Literal["y", "aux"], Placement] = {}


class LinearBackward(Header):
    """``dx = dz·weight``, ``dweight = dzᵀ·x``, ``dbias = Σ dz``"""

    dz: Tensor | None = None
    dy: Tensor | None = None
    aux: Tensor | None = None
    weight: Tensor | None = None
    x: Tensor | None = None
    input_aux: Tensor | None = None
    input_dbias: bool = False
    wants: list[Want] | None = None
    options: Options = Options()
    outputs: dict[Literal["dx", "dweight", "dbias", "input_dbias"], Placement] = {}


class Layer(Header):
    """One layer of a stack."""

    weight: Tensor
    bias: Tensor | None = None
    scales: dict[Literal["weight"], Scale] = {}
    activation: str = Field(default="none", examples=list(ACTIVATIONS))


class MlpForward(Header):
    """A stack of layers."""

    x: Tensor
    layers: Annotated[list[Layer], Field(min_length=1, max_length=64)]
    scales: dict[Literal["x"], Scale] = {}
    save_tape: bool = False
    options: Options = Options()
    outputs: dict[Literal["y"], Placement] = {}


class MlpBackward(Header):
    """The gradients of a stack, from the tape of its forward pass."""

    tape: str | StepOutput
    dy: Tensor | None = None
    dz: Tensor | None = None
    wants: list[Want] = ["dweight", "dbias"]
    layers: Annotated[
        list[dict[Literal["dweight", "dbias"], Placement]] | None, Field(max_length=64)
    ] = None
    keep_tape: bool = False
    outputs: dict[Literal["dx"], Placement] = {}


class Matmul(Header):
    """``D = epilog(alpha · A·B + beta · C)``"""

    a: Tensor
    b: Tensor
    c: Tensor | None = None
    scales: dict[Literal["a", "b"], Scale] = {}
    alpha: float = 1.0
    beta: float | None = None
    epilog: str | None = Field(default=None, examples=[epilog.value for epilog in CUBLASLT])
    bias: Tensor | None = None
    relu_aux: Tensor | None = None
    gelu_aux: Tensor | None = None
    options: Options = Options()
    outputs: dict[str, Placement] = {}


class _Step(Header):
    name: Annotated[str, Field(min_length=1, max_length=64)]


class LinearForwardStep(_Step):
    operation: Literal["linear/forward"]
    header: LinearForward


class LinearBackwardStep(_Step):
    operation: Literal["linear/backward"]
    header: LinearBackward


class MlpForwardStep(_Step):
    operation: Literal["mlp/forward"]
    header: MlpForward


class MlpBackwardStep(_Step):
    operation: Literal["mlp/backward"]
    header: MlpBackward


class MatmulStep(_Step):
    operation: Literal["matmul"]
    header: Matmul


ProgramStep = Annotated[
    LinearForwardStep | LinearBackwardStep | MlpForwardStep | MlpBackwardStep | MatmulStep,
    Field(discriminator="operation"),
]


class RunOutput(StepOutput):
    """An output of a step, and where it goes: by default where that operation would put it."""

    placement: Placement | None = None


class Run(Header):
    """Steps in their order, each of which may read outputs of the earlier ones."""

    steps: Annotated[list[ProgramStep], Field(min_length=1, max_length=64)]
    outputs: Annotated[dict[str, RunOutput], Field(min_length=1, max_length=1024)]


class CreateTensor(Header):
    """A tensor to hold: `value`, as it is or quantized, or zeros of `dtype` and `shape`."""

    value: Tensor | None = None
    quantize: str | None = Field(default=None, examples=list(FLOAT8))
    dtype: str | None = None
    shape: Shape | None = None
    pinned: bool = False
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class ReplaceTensor(Header):
    """New contents."""

    value: Tensor


class TensorLife(Header):
    """How long a tensor is held."""

    pinned: bool | None = None
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class WarmRequest(Header):
    """The header of a request to come, its tensors described but without a source."""

    operation: Literal["linear/forward", "linear/backward", "mlp/forward", "matmul", "run"]
    header: dict[str, object]


class Warm(Header):
    """Plans to make ahead."""

    requests: Annotated[list[WarmRequest], Field(max_length=1024)]
