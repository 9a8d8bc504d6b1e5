"""vLLM's executor, but that an engine core sleeps while its workers compute.

vLLM's own looks for the answer again and again, so its main thread uses a whole core whatever it
has to do, and what it does in its steps cannot be seen in its CPU time. Sleeping is what vLLM does
itself when a second has passed without an answer. Its wake-ups may be lost, above all after a
process was frozen, so nobody sleeps for long.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_LONGEST_MS: Final = 2  # chosen: a step of a small model on a CPU takes tens


class SleepingExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Given to ``vllm serve`` by its name, in all arms of a bench alike."""

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            sleep_briefly(queue._spin_condition)


def sleep_briefly(condition: Any) -> None:
    """Let readers sleep until they are woken, or for a moment, before they look again."""
    wait = condition.wait
    condition.busy_loop_s = 0.0
    condition.wait = lambda timeout_ms=None: wait(_LONGEST_MS)
