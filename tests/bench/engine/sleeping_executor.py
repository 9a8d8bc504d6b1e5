"""vLLM's executor, but that an engine core sleeps while its workers compute.

vLLM's own looks for the answer again and again, so its main thread uses a whole core whatever it
has to do, and what it does in its steps cannot be seen in its CPU time. Sleeping is what vLLM does
itself when a second has passed without an answer.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class SleepingExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Given to ``vllm serve`` by its name, in all arms of a bench alike."""

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            queue._spin_condition.busy_loop_s = 0.0
