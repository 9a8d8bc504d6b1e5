"""An executor whose engine core notes its own times; see ``engine_profile``."""

from __future__ import annotations

import os
from pathlib import Path

from .own_times import OWN_TIMES, OwnTimes
from .sleeping_executor import SleepingExecutor


class ProfiledExecutor(SleepingExecutor):
    """Given to ``vllm serve`` by its name."""

    def _init_executor(self) -> None:
        super()._init_executor()
        OwnTimes(Path(os.environ[OWN_TIMES])).start()
