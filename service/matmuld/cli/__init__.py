"""The command line: `matmuld serve | plans | demo | verify | bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from matmuld_client import MatmuldError
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSubCommand,
    CliToggleFlag,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    get_subcommand,
)

from .. import __version__
from .bench import Bench
from .demo import Demo
from .failure import Failure
from .plans import Plans
from .serve import Serve
from .verify import Verify


class Matmuld(BaseSettings):
    """A plan-caching GEMM service: fused linear operations over HTTP, on a GPU or on NumPy."""

    model_config = SettingsConfigDict(
        cli_prog_name="matmuld",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
    )

    serve: CliSubCommand[Serve] = Field(description="run the service")
    plans: CliSubCommand[Plans] = Field(
        description="list, export, import or clear the choices that services have kept"
    )
    demo: CliSubCommand[Demo] = Field(
        description="train a classifier of handwritten digits through a service"
    )
    verify: CliSubCommand[Verify] = Field(
        description="check every dtype and epilog against an unfused float64 reference"
    )
    bench: CliSubCommand[Bench] = Field(description="measure a service on this machine")
    version: CliToggleFlag[bool] = Field(False, description="print the version and exit")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Commands come from the command line alone; each reads its own environment."""
        return (init_settings,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = CliApp.run(Matmuld, cli_args=arguments or ["--help"])
        if parsed.version:
            print(f"matmuld {__version__}")
            return 0
        command: Any = get_subcommand(parsed, cli_exit_on_error=False)
        return int(command.run())
    except ValidationError as error:
        return _complain("; ".join(map(_sentence, error.errors())), 2)
    except SettingsError as error:
        return _complain(str(error).removeprefix("error parsing CLI: "), 2)
    except (Failure, MatmuldError) as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _sentence(error: ErrorDetails) -> str:
    """Which setting is wrong, and how, without the name of the command."""
    where = ".".join(map(str, error["loc"][1:]))
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"])
    elif error["type"] == "extra_forbidden":
        reason = "there is no such setting"
    else:
        reason = f"{error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"
    return f"{where}: {reason}" if where else reason


def _complain(message: str, status: int) -> int:
    print(f"matmuld: {message}", file=sys.stderr)
    return status
