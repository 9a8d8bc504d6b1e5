"""Torch's events and streams without a GPU, which note what is asked of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch


class Cuda:
    """Events and streams as torch makes them, which note what is asked of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any]] = []
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.blocking, self.timed = blocking, enable_timing

            def record(self, stream: Any) -> None:
                cuda.log.append(("record", stream))

            def synchronize(self) -> None:
                cuda.log.append(("sleep" if self.blocking else "spin", self))

            def elapsed_time(self, end: Event) -> float:
                assert self.timed
                assert end.timed
                return 1500.0

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.priority, self.device = priority, device

            def wait_event(self, event: Event) -> None:
                cuda.log.append(("wait", event))

            def synchronize(self) -> None:
                cuda.log.append(("spin", self))

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: "engine")

    def said(self) -> list[str]:
        return [name for name, _ in self.log]
