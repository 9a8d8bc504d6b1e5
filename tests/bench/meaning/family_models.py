"""Models of families as vLLM wants them: a configuration, a tokenizer, a template; no weights."""

from __future__ import annotations

import json
import pydoc_data.topics
import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .families import Family

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm.config import VllmConfig

_TEMPLATES: Final = Path(__file__).parent / "templates"
_TEKKEN: Final = "data/tekken_240911.json"  # in mistral_common: Mistral's own, of its third version
_VOCABULARY: Final = 2048
_TEXTS: Final = 60  # of Python's own documentation, from which tokens are learned


def corpus() -> list[str]:
    """Prose and code, the same on every machine with this Python."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)[:_TEXTS]]


def write_family(family: Family, directory: Path) -> Path:
    """The directory of the family's model, written anew."""
    directory.mkdir(parents=True)
    if family.mode == "mistral":
        spec = find_spec("mistral_common")
        assert spec is not None, "vLLM needs it"
        assert spec.origin is not None
        shutil.copy(Path(spec.origin).parent / _TEKKEN, directory / "tekken.json")
        end = family.special.index(family.end) + 1  # there they are numbered from 1 on
    else:
        end = write_tokenizer(family, directory)
    config = {**_CONFIG, "bos_token_id": end, "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def family_config(family: Family, directory: Path) -> VllmConfig:
    """vLLM's configuration of an engine with this model."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(directory), tokenizer_mode=family.mode, dtype="float32", enforce_eager=True,
        max_model_len=2048, config_format="hf", load_format="dummy",
    ).create_engine_config()  # fmt: skip


class FamilyWriter:
    """Turns what a model of a family writes into its tokens.

    Args:
        tokenizer: vLLM's, of the family's model.
    """

    def __init__(self, family: Family, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = sorted(family.special, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, known)) + ")")

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """The tokens of ``text``.

        Args:
            special: Whether the names of special tokens in it are these tokens.
        """
        pattern = self._special if special else _OPEN
        tokens: list[int] = []
        for piece in filter(None, pattern.split(text)):
            if special and pattern.fullmatch(piece):
                tokens.append(self._tokenizer.convert_tokens_to_ids(piece))
            else:
                tokens += self._tokenizer.encode(piece, add_special_tokens=False)
        return tokens


_OPEN: Final = re.compile(r"(?<=[<\[])")  # cut here, the name of a special token is mere letters
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 131072,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip


def write_tokenizer(family: Family, directory: Path) -> int:
    """Write a tokenizer made for the family, and its template; returns the token that ends its
    texts."""
    tokenizer = _trained(family.spaces, corpus())
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.special[0],
        "eos_token": family.end,
        "clean_up_tokenization_spaces": False,
    }
    if (name := family.template_file) is not None:
        settings["chat_template"] = (_TEMPLATES / name).read_text()
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id(family.end)
    assert end is not None, f"{family.name} has no {family.end}"
    return int(end)


def _trained(spaces: bool, texts: Sequence[str]) -> Tokenizer:
    """Byte pairs over bytes, or over letters with the space before them as SentencePiece has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if spaces:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        fallback = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        tokenizer.decoder = fallback
        alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=alphabet, show_progress=False,
        initial_alphabet=[] if spaces else pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
