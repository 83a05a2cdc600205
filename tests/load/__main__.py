"""A service under the load of all kinds of users at once, and what it holds afterwards.

    python -m tests.load --device cpu --users 24 --seconds 60

Locust runs in a process of its own, because it replaces what waits in the standard library. The
exit status is 1 if an answer was wrong or a status unexpected, the service logged an error, or
something was left behind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from matmuld.cli.bench.measure import free_port
from matmuld_client import Client

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
ROOT = Path(__file__).parents[2]
TTL_SECONDS = 4
"""What careless users forget expires after that."""
PLANS = 200
"""So few that ever-new shapes drive them out."""
START_SECONDS, SETTLE_SECONDS = 120, 30
RSS_GROWTH = 64 << 20
"""Bytes from the end of the first round to that of the second, which is longer."""


@dataclass
class Target:
    """A service to be put under load."""

    process: subprocess.Popen[bytes]
    addresses: list[str]
    log: Path


@dataclass(frozen=True)
class Footprint:
    """What a service holds."""

    tensors: int
    tensor_bytes: int
    leased: int
    plans: int
    plan_bytes: int
    used_bytes: int
    rss: int

    @classmethod
    def of(cls, client: Client, target: Target) -> Footprint:
        info = client.info()
        return cls(
            info["tensors"]["count"],
            info["tensors"]["nbytes"],
            info["plans"]["leased"],
            info["plans"]["plans"],
            info["plans"]["nbytes"],
            info["memory"]["used_bytes"] - info["recordings"]["nbytes"],
            resident_bytes(target.process.pid),
        )

    def leaks(self, before: Footprint) -> list[str]:
        """What is there that was not there before."""
        return [
            f"{name}: {getattr(self, name)}, before the load {getattr(before, name)}"
            for name in ("tensors", "tensor_bytes", "leased", "plans", "plan_bytes", "used_bytes")
            if getattr(self, name) > getattr(before, name)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.load", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--users", type=int, default=24, help="at a time, of all kinds together")
    parser.add_argument("--seconds", type=int, default=60, help="after a warm-up of a quarter")
    arguments = parser.parse_args()
    faults = load(arguments.device, arguments.users, arguments.seconds)
    for fault in faults:
        print(f"FAULT  {fault}")
    print("verdict:", f"failed, {len(faults)} faults" if faults else "passed")
    return 1 if faults else 0


def load(device: str, users: int, seconds: int) -> list[str]:
    """Run the users for a while and then for longer; what was wrong."""
    faults: list[str] = []
    with serving(device) as target, Client(target.addresses[0], timeout=120) as client:
        before = Footprint.of(client, target)
        held: list[Footprint] = []
        for duration in (max(seconds // 4, 3), seconds):
            status = run_locust(target.addresses, users, duration)
            if status:
                faults.append(f"locust ended with status {status}: see its table above")
            held.append(settled(client, target, before))
            faults += held[-1].leaks(before)
        mebibytes = [f"{footprint.rss / 2**20:.0f}" for footprint in (before, *held)]
        print(f"resident: {', '.join(mebibytes)} MiB at the start and after each round")
        if held[1].rss - held[0].rss > RSS_GROWTH:
            faults.append(f"resident memory grew by more than {RSS_GROWTH >> 20} MiB in round 2")
        log = target.log.read_text()
    if log:
        faults.append(f"the service logged errors:\n{log}")
    return faults


@contextmanager
def serving(device: str) -> Iterator[Target]:
    """A service in a process of its own, on a unix socket and on TCP."""
    with TemporaryDirectory(prefix="matmuld-") as folder:
        addresses = [f"unix:{folder}/socket", f"http://127.0.0.1:{free_port()}"]
        flags = {
            "--device": device,
            "--listen": ",".join(addresses),
            "--ttl-s": str(TTL_SECONDS),
            "--janitor-s": "0.25",
            "--plans": str(PLANS),
            "--plan-store": "off",
            "--log-level": "error",
        }
        words = [word for flag in flags.items() for word in flag]
        log = Path(folder) / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "matmuld", "serve", *words], stderr=stderr
            )
        try:
            target = Target(process, addresses, log)
            await_ready(target)
            yield target
        finally:
            process.terminate()
            process.wait()


def await_ready(target: Target) -> None:
    deadline = time.monotonic() + START_SECONDS
    with Client(target.addresses[0]) as client:
        while not client.ready():
            if target.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the service did not start:\n{target.log.read_text()}")
            time.sleep(0.05)


def run_locust(addresses: Sequence[str], users: int, seconds: int) -> int:
    """Its exit status; its table goes to where this program's output goes."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"]
    flags = {
        "--host": ",".join(addresses),
        "--users": str(users),
        "--spawn-rate": str(users),
        "--run-time": f"{seconds}s",
        "--stop-timeout": "30s",
        "--loglevel": "WARNING",
    }
    words = [word for flag in flags.items() for word in flag]
    environment = {**os.environ, "COLUMNS": "120"}
    command += ["--only-summary", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def settled(client: Client, target: Target, before: Footprint) -> Footprint:
    """What is held once all is freed that can be, or when it has been waited for long enough."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        client.evict_plans()
        footprint = Footprint.of(client, target)
        if not footprint.leaks(before) or time.monotonic() > deadline:
            return footprint
        time.sleep(0.25)


def resident_bytes(pid: int) -> int:
    """By proc_pid_status(5)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(f"process {pid} has no memory")


if __name__ == "__main__":
    sys.exit(main())
