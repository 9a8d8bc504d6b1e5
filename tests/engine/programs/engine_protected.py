"""A real engine with several requests at a time: which protected blocks does it lose?"""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

from one_engine import BLOCK, new_llm, run_program

HEAD = 7 * BLOCK  # protected tokens that open the prompts of one tenant
TENANTS = 3


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Serve the workload beside busy loops; options: model, rounds, busy."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(options["busy"])]
    try:
        return _serve(options)
    finally:
        for other in others:
            other.kill()
            other.wait()


def _serve(options: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams, TokensPrompt

    llm = new_llm(options["model"], blocks=80, max_num_batched_tokens=512)
    watch = Watch(llm.llm_engine.engine_core.engine_core.scheduler)
    rng = random.Random(1)
    for number in range(options["rounds"]):
        prompts, sampling = [], []
        for _ in range(6):
            tokens, tag = prompt(rng, number)
            prompts.append(TokensPrompt(prompt_token_ids=tokens))
            params = {"kv_transfer_params": {"kvgraph": tag}}
            sampling.append(
                SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, extra_args=params)
            )
        llm.generate(prompts, sampling, use_tqdm=False)
    return watch.report()


def prompt(rng: random.Random, number: int) -> tuple[list[int], dict[str, Any]]:
    """Now and then a tenant's, behind its rules; mostly text that never comes again."""
    if rng.random() < 0.15 or number == 0:
        tenant = rng.randrange(TENANTS)
        tail = [rng.randrange(10, 250) for _ in range(rng.randrange(20, 150))]
        head = [3 + tenant, *range(10, 9 + HEAD)]
        return head + tail, {"segments": [{"layer": "rules", "start": 0, "end": HEAD}]}
    return [rng.randrange(10, 250) for _ in range(rng.randrange(100, 400))], {}


class Watch:
    """Stands where the pool gives blocks away."""

    def __init__(self, scheduler: Any) -> None:
        self._side = scheduler.connector.side
        self._pool = pool = scheduler.kv_cache_manager.block_pool
        self._protected: set[int] = set()
        self.lost = self.needless = self.taken = 0
        observer = self._side.observer
        scheduled, take = observer.request_scheduled, pool.get_new_blocks

        def noted(request: Any, *args: Any) -> None:
            """Reads the request alone: events are made once, for the sidecar."""
            from kvgraph.hooks.keys import key_of

            if (request.kv_transfer_params or {}).get("kvgraph"):
                self._protected.update(map(key_of, request.block_hashes[: HEAD // BLOCK]))
            scheduled(request, *args)

        def taken(count: int) -> Any:
            self._look(count)
            return take(count)

        observer.request_scheduled, pool.get_new_blocks = noted, taken

    def report(self) -> dict[str, Any]:
        arranger, client = self._side.arranger, self._side.client
        return {
            "lost": self.lost,
            "needless": self.needless,
            "taken": self.taken,
            "protected": len(self._protected),
            "stale": arranger.stale,
            "moved": arranger.moved,
            "counted": arranger.protected_evicted,
            "hellos": client.hellos,
            "dropped": client.dropped,
        }

    def _look(self, count: int) -> None:
        free = [self._is_protected(b) for b in self._pool.free_block_queue.get_all_free_blocks()]
        going = sum(free[:count])
        others_left = sum(not each for each in free[count:])
        self.lost += going
        self.needless += min(going, others_left)
        self.taken += count

    def _is_protected(self, block: Any) -> bool:
        from kvgraph.hooks.keys import key_of

        return block.block_hash is not None and key_of(block.block_hash[:-4]) in self._protected


_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


if __name__ == "__main__":
    run_program(main)
