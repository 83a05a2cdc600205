"""The users of a service, for locust; `python -m tests.load` starts a service and runs them.

locust -f tests/load/locustfile.py --host unix:/run/matmuld.sock,http://127.0.0.1:8000
"""

from __future__ import annotations

from locust import events
from locust.env import Environment

from tests.load.caller import CHECKED
from tests.load.careless import Careless
from tests.load.churner import Churner
from tests.load.inference import InferenceWorker
from tests.load.trainer import Trainer
from tests.load.uploader import Uploader

KINDS = (InferenceWorker, Trainer, Churner, Uploader, Careless)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def tell_what_was_checked(environment: Environment, **_: object) -> None:
    """A run in which a kind of user had nothing checked is none."""
    print("checked:", ", ".join(f"{kind} {n}" for kind, n in sorted(CHECKED.items())))
    idle = [kind.__name__ for kind in KINDS if not CHECKED[kind.__name__]]
    if idle:
        print(f"nothing was checked by {', '.join(idle)}")
        environment.process_exit_code = 1
