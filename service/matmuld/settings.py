"""Every setting of the service, by flag, environment (`MATMULD_…`) and TOML file, in that order of
precedence.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

_UNIX_PATH_LIMIT = 107
"""Bytes; what the kernel has room for."""


def _device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda:[0-9]+", value):
        return value
    raise ValueError(f"expected auto, cpu or cuda:N, got {value!r}")


def _address(value: str) -> str:
    form = f"expected unix:PATH or http://HOST:PORT, got {value!r}"
    scheme, _, path = value.partition(":")
    if scheme == "unix" and path:
        if len(path.encode()) > _UNIX_PATH_LIMIT:
            raise ValueError(
                f"the path of a unix socket is at most {_UNIX_PATH_LIMIT} bytes: {path}"
            )
        return value
    url = urlsplit(value)
    try:
        complete = bool(url.hostname) and url.port is not None
    except ValueError as error:
        raise ValueError(f"{form}: {error}") from None
    if scheme != "http" or not complete or url.path.strip("/") or url.query:
        raise ValueError(form)
    return value.rstrip("/")


def _separated(value: object) -> object:
    """Values with commas between them, as the environment has them."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return [item.strip() for part in parts for item in str(part).split(",")]


Device = Annotated[str, AfterValidator(_device)]
Address = Annotated[str, AfterValidator(_address)]


Mode = Literal["off", "lazy", "eager"]
"""When ways and algorithms are measured."""


def _folder(value: object) -> object:
    """A path, or `off`."""
    if value == "off":
        return None
    if value == "":
        raise ValueError("expected a folder or off, got ''")
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


def user_cache() -> Path | None:
    """`matmuld/plans` in the user's cache, as the XDG Base Directory Specification has it; None for
    a user without a home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()
    return base / "matmuld" / "plans" if base.is_absolute() else None


class Configured(BaseSettings):
    """Settings of flags, environment and file."""

    model_config = SettingsConfigDict(env_prefix="MATMULD_", frozen=True)

    config: Path | None = Field(default=None, description="TOML file with any of these settings")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = init_settings().get("config") or env_settings().get("config")
        if not path:
            return (init_settings, env_settings)
        if not Path(path).is_file():
            raise SettingsError(f"config: no such file: {path}")
        try:
            file = TomlConfigSettingsSource(settings_cls, Path(path))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"config: cannot read {path}: {error}") from error
        return (init_settings, env_settings, file)


class Stored(Configured):
    """Where the plan store is; of a file that is for a whole service, that line."""

    model_config = SettingsConfigDict(extra="ignore")

    plan_store: Annotated[Path | None, BeforeValidator(_folder)] = Field(
        default_factory=user_cache,
        description="folder for measured choices, found again after a restart, or off; "
        "default: matmuld/plans in the user's cache",
    )


class Settings(Stored):
    """What a service is started with."""

    model_config = SettingsConfigDict(extra="forbid")

    device: Device = Field(
        default="auto", description="auto, cpu or cuda:N; auto takes the first GPU"
    )
    listen: Annotated[list[Address], NoDecode, BeforeValidator(_separated)] = Field(
        default=["http://127.0.0.1:8000"],
        min_length=1,
        description="unix:PATH or http://HOST:PORT, where port 0 takes a free one; may be repeated",
    )
    plans: int = Field(default=1024, ge=1, description="plans held at most")
    plan_bytes: int = Field(
        default=1 << 30, ge=0, description="bytes of host and device memory for plans"
    )
    autotune: Mode | None = Field(
        default=None,
        description="measure which way and algorithm is best for a signature: never, when there is "
        "nothing else to do, or before its first request is answered; None: lazy on a GPU",
    )
    autotune_s: float = Field(
        default=0.25,
        gt=0,
        allow_inf_nan=False,
        description="seconds of measuring for each comparison",
    )
    strategies: Annotated[list[str], NoDecode, BeforeValidator(_separated)] = Field(
        default=[],
        description="ways to take, unmeasured, wherever there are such; may be repeated",
    )
    deterministic: bool = Field(
        default=False, description="every result has the same bits every time"
    )
    lean_launch: bool = Field(
        default=True,
        description="on a GPU, start products by cuBLASLt's bare binding if its self-test passes; "
        "else by nvmath's execute, which takes the host longer",
    )
    recording_bytes: int = Field(
        default=1 << 28,
        ge=0,
        description="bytes of device memory for recorded steps; 0: none are recorded",
    )
    tenant_bytes: int | None = Field(
        default=None,
        ge=0,
        description="bytes of a tenant's tensors; None: 80 % of the device's memory",
    )
    memory_limit: int | None = Field(
        default=None,
        ge=1 << 20,
        description="bytes for arrays on the CPU; None: 80 % of the memory",
    )
    ttl_s: float = Field(
        default=3600.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that an unused tensor is held",
    )
    janitor_s: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds between looks for expired tensors",
    )
    body_limit: int = Field(
        default=1 << 30, ge=1 << 10, description="bytes of a msgpack or JSON body"
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        description="requests at work at once; None: two for each core, or 64 on a GPU",
    )
    queue_requests: int = Field(
        default=1024,
        ge=0,
        description="further requests that may be read, wait, or be answered; others are refused",
    )
    queue_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="bytes of the bodies of all requests that are in the service",
    )
    read_timeout_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a client may be silent within a request",
    )
    write_timeout_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a client may take nothing of its reply",
    )
    min_rate: int = Field(
        default=1 << 14,
        ge=0,
        description="bytes per second at which a request must come, and its reply be taken, once "
        "those seconds have passed",
    )
    warm: Path | None = Field(
        default=None,
        description="JSON file, a body of POST /v1/plans/warm: planned before the service is ready",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="what is logged to stderr"
    )
