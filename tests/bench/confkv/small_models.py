"""The models of the bench: those that ship, one that is named, and random ones for exactness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ..errors import BenchError

_SHAPE: Final = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: Final[dict[str, Callable[[], Any]]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=512)
    ),
}
WEIGHTS: Final = Path(__file__).parent.parent / "weights"


class Loaded(NamedTuple):
    """A model in float32, ready to be asked, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any


def shipped(course: str) -> list[Path]:
    """Folders of the models that ship and were taught by this course, ``text`` or ``recall``."""
    return sorted(path.parent for path in WEIGHTS.glob(f"{course}*/config.json"))


def load(folder: Path) -> Loaded:
    """A model of any family that transformers knows.

    Raises:
        BenchError: There is none in the folder.
    """
    if not (folder / "config.json").is_file():
        raise BenchError(f"no model at {folder}: a folder with config.json and weights")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return Loaded(folder.name, model.eval(), tokenizer)


def random_model(family: str) -> Any:
    """A small model of one of ``FAMILIES`` with random weights, always the same; it never ends."""
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None
    return model
