"""The models of the bench: those that ship, and any that is named."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ..errors import BenchError, InputError

_READ_GGUF: Final = ("gguf", "accelerate")  # packages that transformers reads such files with
_WEIGHTS: Final = Path(__file__).parent.parent / "weights"
TEXT_MODEL: Final = _WEIGHTS / "text-1m"


class Loaded(NamedTuple):
    """A model in float32, ready to be asked, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any


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
