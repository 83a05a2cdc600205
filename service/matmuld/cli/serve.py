"""`matmuld serve`: the service."""

from __future__ import annotations

import json
import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

from ..settings import Settings

log = logging.getLogger("matmuld")


class Serve(Settings):
    """Run the service. For --ttl-s TOML has ttl_s, and the environment MATMULD_TTL_S."""

    def run(self) -> int:
        from .server import run

        _log_to_stderr(self.log_level)
        log.info("settings: %s", described(self))
        run(self)
        return 0


def described(settings: Settings) -> str:
    """The settings in effect; of a secret pydantic shows asterisks."""
    values = settings.model_dump(mode="json").items()
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in values)


def _log_to_stderr(level: str) -> None:
    """In colour for people, in plain lines for files."""
    handler: logging.Handler = logging.StreamHandler()
    layout = "%(asctime)s %(levelname)s %(message)s"
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        layout = "%(message)s"
    logging.basicConfig(level=level.upper(), format=layout, handlers=[handler])
    if level == "info":
        logging.getLogger("uvicorn").setLevel("WARNING")
