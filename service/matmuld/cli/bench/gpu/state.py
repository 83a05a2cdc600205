"""The state that a GPU is in, by nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess

_FIELDS = {
    "driver": "driver_version",
    "SM clock": "clocks.sm",
    "memory clock": "clocks.mem",
    "power": "power.draw",
    "power limit": "power.limit",
    "temperature in °C": "temperature.gpu",
}


def gpu_state(device: str) -> dict[str, str]:
    """Driver, clocks, power and temperature; nothing where nvidia-smi is missing or refuses."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ",".join(_FIELDS.values())
    command = ["nvidia-smi", f"--id={device.removeprefix('cuda:')}", f"--query-gpu={query}"]
    asked = subprocess.run(
        [*command, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        return {}
    return dict(zip(_FIELDS, (part.strip() for part in asked.stdout.split(",")), strict=True))
