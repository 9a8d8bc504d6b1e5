"""A small vLLM engine for a program: options as JSON, one line ``RESULT {json}``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 32


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
