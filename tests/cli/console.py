"""The command line, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

COMMAND = (sys.executable, "-m", "matmuld")


def matmuld(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that comes to an end by itself, on a wide terminal."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=_environment(), check=False
    )


@dataclass
class Serving:
    """`matmuld serve` at work, and what it has logged."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def stop(self, number: int) -> int:
        """The exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait()


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[Serving]:
    """A service that listens on every `--listen` among the arguments."""
    command, environment = [*COMMAND, "serve", *arguments], _environment() | environment
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        service = Serving(process)
        assert process.stderr is not None
        try:
            while len(service.addresses) < arguments.count("--listen"):
                line = process.stderr.readline()
                assert line, f"the service ended before it listened: {service.log}"
                service.log.append(line)
                service.addresses += re.findall(r"listening on (\S+)", line)
            yield service
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    """Without settings that whoever runs the tests may have."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MATMULD_")}
    return kept | {"COLUMNS": "160", "MATMULD_PLAN_STORE": "off"}
