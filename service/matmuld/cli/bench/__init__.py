"""`matmuld bench`: what requests cost here, beside what they cannot cost less than."""

from __future__ import annotations

from pydantic import BaseModel, Field
from pydantic_settings import CliSubCommand, get_subcommand

from .gpu import GpuBench
from .http import HttpBench
from .serve import ServeBench


class Bench(BaseModel):
    """Measure the service on this machine."""

    http: CliSubCommand[HttpBench] = Field(
        description="latency of small requests over TCP and a unix socket, beside bare echoes"
    )
    serve: CliSubCommand[ServeBench] = Field(
        description="latency against throughput of a service that many clients use"
    )
    gpu: CliSubCommand[GpuBench] = Field(
        description="products and requests on a GPU, beside nvmath and PyTorch"
    )

    def run(self) -> int:
        command = get_subcommand(self, cli_exit_on_error=False)
        assert isinstance(command, HttpBench | ServeBench | GpuBench)
        return command.run()
