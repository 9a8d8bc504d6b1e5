"""The models of the bench: those that ship, one that is named, and random ones for exactness."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ..errors import BenchError, InputError

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
_READ_GGUF: Final = ("gguf", "accelerate")  # packages that transformers reads such files with
WEIGHTS: Final = Path(__file__).parent.parent / "weights"


class Loaded(NamedTuple):
    """A model in float32, ready to be asked, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any


def shipped(course: str) -> list[Path]:
    """Folders of the models that ship and were taught by this course, ``text`` or ``recall``."""
    return sorted(path.parent for path in WEIGHTS.glob(f"{course}*/config.json"))


def load(place: Path) -> Loaded:
    """A model of any family that transformers knows, from a folder or a GGUF file."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": place}
    if place.suffix == ".gguf" and place.is_file():
        _check_that_gguf_is_read(place)
        where = {"pretrained_model_name_or_path": place.parent, "gguf_file": place.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
    elif (place / "config.json").is_file():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"))
    else:
        raise InputError(f"no model at {place}: a folder with config.json and weights, or a .gguf")
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.hf_quantizer = None  # in float32 it is a model like any other, and can be saved
    vars(model.config).pop("quantization_config", None)
    return Loaded(place.name, model.eval(), tokenizer)


def _check_that_gguf_is_read(file: Path) -> None:
    missing = [name for name in _READ_GGUF if find_spec(name) is None]
    if missing:
        raise BenchError(f"to read {file.name}: pip install {' '.join(missing)}")


def random_model(family: str) -> Any:
    """A small model of one of ``FAMILIES`` with random weights, always the same; it never ends."""
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None
    return model
