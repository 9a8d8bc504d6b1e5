"""What the confidence cache is tested with: small random models, and budgets that repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_PLAIN: Final = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
_SHAPE: Final = {**_PLAIN, "num_key_value_heads": 2}
FAMILIES: Final[dict[str, Callable[[], Any]]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=512)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_PLAIN)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=None)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16)),
}


def random_model(family: str) -> Any:
    """A small model of one of ``FAMILIES`` with random weights, always the same; it never ends."""
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None
    return model


class Replayed:
    """Repeats the budgets of an earlier run, step by step; then its last ones."""

    def __init__(self, schedule: Sequence[Sequence[int]]) -> None:
        self._steps: Iterator[list[int]] = iter([list(step) for step in schedule])
        self._last = list(schedule[0])

    def choose(self, confidence: Sequence[float]) -> list[int]:
        self._last = next(self._steps, self._last)
        return self._last
