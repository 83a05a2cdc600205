"""Uploaders: they replace weights that others use meanwhile."""

from __future__ import annotations

import numpy as np
from locust import between, events, task

from tests.load.caller import Caller
from tests.load.shared import SHARED, Shared, contents

SIZES = (192, 640)
"""The one travels as a payload, the other is streamed into place."""
CHECKED_SHARE = 0.25


class Uploader(Caller):
    """Replaces a shared weight again and again.

    The weight outlives its user, because others may be in the middle of a request.
    """

    weight = 2
    wait_time = between(0.01, 0.05)

    def on_start(self) -> None:
        super().on_start()
        size = SIZES[self.number // 2 % len(SIZES)]
        self.tensor = self.client.put(contents(size, 0).astype(np.float32), pinned=True)
        self.shared = Shared(size, self.tensor.handle)
        SHARED.append(self.shared)

    def on_stop(self) -> None:
        events.quitting.add_listener(  # type: ignore[no-untyped-call]
            lambda **_: self.client.close()
        )

    @task
    def replace(self) -> None:
        shared = self.shared
        shared.begun += 1
        value = contents(shared.size, shared.begun).astype(np.float32)
        self.ask("PUT tensors", lambda: self.tensor.replace(value))
        shared.done = shared.begun
        if self.rng.random() < CHECKED_SHARE:
            self.ask(
                "GET tensors",
                self.tensor.numpy,
                lambda got: shared.check(got, shared.done, lambda whole: whole),
            )
