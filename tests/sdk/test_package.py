"""The package from outside: names, types, what it needs."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from types import ModuleType

import matmuld_client
import pytest


def test_all_names_what_is_there_in_order() -> None:
    public = {
        name
        for name, value in vars(matmuld_client).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(matmuld_client.__all__) == public
    assert matmuld_client.__all__ == sorted(matmuld_client.__all__)


@pytest.mark.parametrize("name", matmuld_client.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    public = getattr(matmuld_client, name)
    assert public.__doc__
    if name in ("Client", "RemoteTensor", "Tape", "TensorView"):
        for attribute in dir(public):
            member = getattr(public, attribute)
            if not attribute.startswith("_") and (callable(member) or isinstance(member, property)):
                assert member.__doc__, f"{name}.{attribute}"


def test_the_package_is_typed() -> None:
    assert (resources.files(matmuld_client) / "py.typed").is_file()


def test_importing_loads_only_what_the_package_says_it_needs() -> None:
    code = (
        "import sys; import matmuld_client; import ml_dtypes, msgpack, numpy;"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    run = subprocess.run([sys.executable, "-S", "-c", PATH + code], capture_output=True, text=True)
    loaded = {name for name in run.stdout.split() if not name.startswith("_")}
    assert loaded - {"cython_runtime"} == {"matmuld_client", "ml_dtypes", "msgpack", "numpy"}


PATH = f"import sys; sys.path[:] = {sys.path!r}; "
