"""Imports point down the flow, CUDA stays in its engine, and the client stands alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (
    # From the top; what stands on one line does not know of each other. A package is one part.
    ("__main__",),
    ("cli",),
    ("http",),
    ("service",),
    ("operations", "tuner"),
    ("measuring",),
    ("steps", "strategies"),
    ("recordings",),
    ("calls",),
    ("operands",),
    ("memory", "pool"),
    ("replies", "schemas"),
    ("engine",),
    ("store",),
    ("__init__", "entries", "readers", "scheduler", "settings"),
)
RANKS = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

CUDA = ("cuda", "cupy", "cupyx", "nvmath")
CUDA_MODULES = tuple(
    f"matmuld.engine{name}"
    for name in ("", ".cublaslt", ".cuda", ".executed", ".kernels", ".quantization")
)
CUDA_PACKAGES = ("matmuld.cli.bench.gpu",)
SHARED_WITH_THE_CLIENT = ("matmuld_client.errors", "matmuld_client.wire")


class Module(NamedTuple):
    name: str
    package: str
    source: str

    @classmethod
    def read(cls, path: Path, top: Path) -> Module:
        parts = path.relative_to(top).with_suffix("").parts
        package = ".".join(parts[:-1])
        return cls(
            package if parts[-1] == "__init__" else ".".join(parts), package, path.read_text()
        )

    def imports(self) -> Iterator[str]:
        """What is imported, also inside functions; names from a module as ``module.name``."""
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), self.package)
                yield from (f"{origin}.{alias.name}" for alias in node.names)


def modules(top: Path, package: str) -> list[Module]:
    found = [Module.read(path, top) for path in sorted((top / package).rglob("*.py"))]
    assert found
    return found


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def part_of(name: str) -> str:
    """The part of the service that a name lies in; names of the package itself: `__init__`."""
    part = f"{name}.".split(".")[1]
    return part if part in RANKS else "__init__"


def may_import(module: Module, name: str) -> bool:
    if is_within(name, *CUDA):
        return module.name in CUDA_MODULES or is_within(module.name, *CUDA_PACKAGES)
    if is_within(name, "matmuld_client"):
        return is_within(name, *SHARED_WITH_THE_CLIENT) or part_of(module.name) == "cli"
    if is_within(name, "matmuld"):
        own, other = part_of(module.name), part_of(name)
        return own == other or RANKS[own] < RANKS[other]
    return True


def violations(found: list[Module]) -> list[str]:
    return [
        f"{module.name} imports {name}"
        for module in found
        for name in module.imports()
        if not may_import(module, name)
    ]


def test_the_service_imports_only_downwards() -> None:
    assert violations(modules(ROOT / "service", "matmuld")) == []


def test_every_module_of_the_service_is_in_a_layer_and_every_layer_is_there() -> None:
    names = [module.name for module in modules(ROOT / "service", "matmuld")]
    parts = {name.split(".")[1] if "." in name else "__init__" for name in names}
    assert parts == set(RANKS)


def test_the_client_never_imports_the_service() -> None:
    found = modules(ROOT / "clients/python", "matmuld_client")
    assert [m.name for m in found for name in m.imports() if is_within(name, "matmuld")] == []


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("matmuld.engine.cpu", "from matmuld.http.app import build_app"),
        ("matmuld.engine.cpu", "from ..http import app"),
        ("matmuld.engine.cpu", "import matmuld.pool as plans"),
        ("matmuld.operations.linear", "def late():\n    from .. import cli"),
        ("matmuld.pool", "from .memory.tensors import TensorStore"),
        ("matmuld.operations.linear", "import cupy"),
        ("matmuld.engine.cpu", "from nvmath.linalg import advanced"),
        ("matmuld.http.app", "from matmuld_client import Client"),
        ("matmuld.strategies", "from matmuld_client import client, wire"),
    ],
)
def test_a_forbidden_import_is_found(module: str, statement: str) -> None:
    assert len(violations([Module(module, module.rpartition(".")[0], statement)])) == 1


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("matmuld.http.app", "from .. import __version__, settings"),
        ("matmuld.http.app", "from . import exchange"),
        ("matmuld.operations.linear", "from ..engine.protocol import Array"),
        ("matmuld.engine.cuda", "import cupy\nfrom nvmath.linalg import advanced"),
        ("matmuld.engine.cpu", "from matmuld_client import wire\nimport matmuld_client.errors"),
        ("matmuld.cli.demo", "from matmuld_client import Client"),
    ],
)
def test_an_allowed_import_is_not(module: str, statement: str) -> None:
    assert violations([Module(module, module.rpartition(".")[0], statement)]) == []
