"""The model that the demo writes itself: a random Llama, and a tokenizer of numbered words.

Nothing is downloaded. The weights are random but fixed by the seed, in float32, so that a cached
prefix and a recomputed one give the same tokens; they are many enough that prefill costs something.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of the random Llama; the default has about 17 M parameters."""

    hidden: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 1152
    vocab: int = 2048
    max_tokens: int = 4096
    seed: int = 20
    spread: float = 0.06  # of the random weights; wide enough that answers do not repeat one word


TINY: Final = ModelShape(hidden=128, layers=2, heads=2, kv_heads=2, intermediate=384, vocab=512)


def default_directory(shape: ModelShape) -> Path:
    """Where a model of this shape is kept between runs: below the user's cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = "-".join(str(value) for value in asdict(shape).values())
    return cache / "kvgraph" / f"llama-{digest}"


def ensure_model(shape: ModelShape | None = None, directory: Path | None = None) -> Path:
    """The directory of a model of ``shape``, written on first use, complete or not at all."""
    shape = shape or ModelShape()
    directory = directory or default_directory(shape)
    if (directory / "config.json").exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".model-", dir=directory.parent))
    try:
        _write_weights(shape, scratch)
        _write_tokenizer(shape, scratch)
        scratch.rename(directory)
    except OSError:
        if not (directory / "config.json").exists():  # another run may have been first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def vocabulary_size(model: str) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return int(config.get_text_config().vocab_size)


def _write_weights(shape: ModelShape, directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.max_tokens,
        tie_word_embeddings=False,
        initializer_range=shape.spread,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        LlamaForCausalLM(config).save_pretrained(directory)


def _write_tokenizer(shape: ModelShape, directory: Path) -> None:
    """Words ``w3 w4 …``, split at spaces: the text of N tokens has N words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(len(SPECIAL_TOKENS), shape.vocab))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": shape.max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
