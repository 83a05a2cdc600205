"""Fused linear operations on a matmuld service: NumPy in, NumPy out."""

from .client import Client
from .errors import (
    Conflict,
    DeviceLost,
    Draining,
    Gone,
    Internal,
    InvalidOperands,
    LengthRequired,
    Malformed,
    MatmuldError,
    MethodNotAllowed,
    NotFound,
    OutOfMemory,
    RequestError,
    Starting,
    Timeout,
    TooLarge,
    TransportError,
    UnknownHandle,
    UnsupportedMediaType,
)
from .operations import Accumulate, Layer, LinearGradients, MLPGradients, Options
from .tensors import RemoteTensor, Tape
from .views import TensorView

__all__ = [
    "Accumulate",
    "Client",
    "Conflict",
    "DeviceLost",
    "Draining",
    "Gone",
    "Internal",
    "InvalidOperands",
    "Layer",
    "LengthRequired",
    "LinearGradients",
    "MLPGradients",
    "Malformed",
    "MatmuldError",
    "MethodNotAllowed",
    "NotFound",
    "Options",
    "OutOfMemory",
    "RemoteTensor",
    "RequestError",
    "Starting",
    "Tape",
    "TensorView",
    "Timeout",
    "TooLarge",
    "TransportError",
    "UnknownHandle",
    "UnsupportedMediaType",
]
