"""A small vLLM engine for a program: options as JSON, one line ``RESULT {json}``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

BLOCK = 32
PATIENCE_S = 60.0


def new_llm(model: str, blocks: int, max_model_len: int = 512, **others: Any) -> Any:
    """An ``LLM`` with a pool of so many blocks, four requests at a time unless it is said."""
    from vllm import LLM

    fixed = {"dtype": "float32", "block_size": BLOCK, "gpu_memory_utilization": 0.3}
    usual = {"enforce_eager": True, "max_num_seqs": 4}
    fields = {"num_gpu_blocks_override": blocks, "max_model_len": max_model_len}
    return LLM(model, **{**fixed, **usual, **fields, **others})


def sampling(tokens: int, tag: Any = None, **others: Any) -> Any:
    """So many tokens of the likeliest; ``tag``: what the request says to us."""
    from vllm import SamplingParams

    said = {"extra_args": {"kv_transfer_params": {"kvgraph": tag}}} if tag is not None else {}
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **{**said, **others})


def generate(llm: Any, prompt: list[int], tokens: int, tag: Any = None, **others: Any) -> Any:
    """What vLLM answers to a prompt of token ids."""
    from vllm import TokensPrompt

    params = sampling(tokens, tag, **others)
    (answer,) = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
    return answer


class SteppedEngine:
    """An engine that is stepped by hand; ``answers``: what came of each request, by its name."""

    def __init__(self, model: str, blocks: int) -> None:
        self.engine = new_llm(model, blocks=blocks).llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.connector = self.scheduler.connector
        self.answers: dict[str, Any] = {}
        self.trust_no_cost()

    @property
    def side(self) -> Any:
        """Our part of the scheduler's process; None without it."""
        return self.connector.side if self.connector is not None else None

    @property
    def bridge(self) -> Any:
        return self.side.bridge

    @property
    def counts(self) -> dict[str, float]:
        return asdict(self.bridge.ledger.counts) if self.side is not None else {}

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    def trust_no_cost(self) -> None:
        """A model as small as this computes faster than it loads: loads are to be seen here."""
        if self.side is not None:
            costs = self.bridge.ledger.costs
            costs.worth_loading = costs.worth_asking = lambda *_: True

    def add(self, name: str, prompt: list[int], tokens: int = 8, tag: Any = None) -> None:
        from vllm import TokensPrompt

        said = sampling(tokens, {"session": name, **(tag or {})})
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), said)

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.answers[output.request_id] = output

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            self.step()
            if time.monotonic() > deadline:
                raise SystemExit("what was awaited did not come")

    def serve(self, name: str, prompt: list[int], tag: Any = None) -> int:
        """Serve one request to its end; how many of its prompt's tokens were computed."""
        self.add(name, prompt, tag=tag)
        self.until(lambda: name in self.answers)
        self.settle()
        return len(prompt) - (self.answers[name].num_cached_tokens or 0)

    def text(self, name: str) -> list[int]:
        return list(self.answers[name].outputs[0].token_ids)

    def settle(self) -> None:
        self.until(lambda: not self.scheduler.has_requests())
        if self.side is not None:
            self.until(self.is_settled)

    def is_settled(self) -> bool:
        """Of what was copied last, an idle engine would hear with its next step only."""
        self.bridge.answered(self.worker.take_answer())
        return not len(self.bridge.ledger.book)


def user_connector() -> Any:
    """A configuration with a connector of the user's, which counts its calls."""
    from vllm.config import KVTransferConfig

    place = {"kv_connector_module_path": "engine_user_connector"}
    return KVTransferConfig(kv_connector="UserConnector", kv_role="kv_both", **place)


def wait_for(file: str, most_s: float = 120.0) -> None:
    """Wait until the test has made this file, however busy the machine is."""
    until = time.monotonic() + most_s
    while not Path(file).exists():
        if time.monotonic() > until:
            raise TimeoutError(file)
        time.sleep(0.05)


def run_program(main: Callable[[dict[str, Any]], Any]) -> None:
    result = main(json.loads(sys.argv[1]))
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")
