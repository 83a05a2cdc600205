"""Keyword arguments by what an operation returns for them; for type checkers only.

`To…` says where the result stays: with the caller, or in the service. `…AndAux`, `…AndTape` and
`…AndExtras` return more than the result. `…Step` are those of a program's steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from .operations import (
    Activation,
    AuxEpilog,
    InputScales,
    LinearScales,
    MatmulScales,
    Operand,
    Options,
    PlainEpilog,
    Priority,
)
from .tensors import RemoteTensor

if TYPE_CHECKING:
    from typing import Required


class _ToArray(TypedDict, total=False):
    out: Literal["array"] | None


class _ToTensor(TypedDict, total=False):
    out: Required[Literal["tensor"] | RemoteTensor]


class _Step(TypedDict, total=False):
    options: Options | None


class _Call(TypedDict, total=False):
    timeout: float | None
    deadline: float | None
    priority: Priority | None


class _LinearStep(_Step, total=False):
    c: Operand | None
    scales: LinearScales | None
    alpha: float
    beta: float | None
    activation: Activation


class LinearStep(_LinearStep, total=False):
    save_aux: Literal[False]


class LinearStepAndAux(_LinearStep, total=False):
    save_aux: Required[Literal[True]]


class _Linear(_LinearStep, _Call, total=False):
    pass


class LinearToArray(_Linear, _ToArray, total=False):
    save_aux: Literal[False]


class LinearToTensor(_Linear, _ToTensor, total=False):
    save_aux: Literal[False]


class LinearToArrayAndAux(_Linear, _ToArray, total=False):
    save_aux: Required[Literal[True]]


class LinearToTensorAndAux(_Linear, _ToTensor, total=False):
    save_aux: Required[Literal[True]]


class _MLPStep(_Step, total=False):
    scales: InputScales | None


class MLPStep(_MLPStep, total=False):
    save_tape: Literal[False]


class MLPStepAndTape(_MLPStep, total=False):
    save_tape: Required[Literal[True]]


class _MLP(_MLPStep, _Call, total=False):
    pass


class MLPToArray(_MLP, _ToArray, total=False):
    save_tape: Literal[False]


class MLPToTensor(_MLP, _ToTensor, total=False):
    save_tape: Literal[False]


class MLPToArrayAndTape(_MLP, _ToArray, total=False):
    save_tape: Required[Literal[True]]


class MLPToTensorAndTape(_MLP, _ToTensor, total=False):
    save_tape: Required[Literal[True]]


class _MatmulStep(_Step, total=False):
    scales: MatmulScales | None
    alpha: float
    beta: float | None
    bias: Operand | None
    relu_aux: Operand | None
    gelu_aux: Operand | None


class MatmulStep(_MatmulStep, total=False):
    epilog: PlainEpilog | None


class MatmulStepAndExtra(_MatmulStep, total=False):
    epilog: Required[AuxEpilog]


class _Matmul(_MatmulStep, _Call, total=False):
    pass


class MatmulToArray(_Matmul, _ToArray, total=False):
    epilog: PlainEpilog | None


class MatmulToTensor(_Matmul, _ToTensor, total=False):
    epilog: PlainEpilog | None


class MatmulToArrayAndExtras(_Matmul, _ToArray, total=False):
    epilog: Required[AuxEpilog]


class MatmulToTensorAndExtras(_Matmul, _ToTensor, total=False):
    epilog: Required[AuxEpilog]
