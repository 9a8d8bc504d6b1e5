"""The small models: their shapes, and how long each is taught.

All are transformers' own classes, with untied embeddings: with tied ones, recall stayed at chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_BASE: Final = 5e5  # of RoPE


@dataclass(frozen=True, slots=True)
class Pupil:
    """One model to teach.

    Attributes:
        family: ``llama`` or ``gpt2``.
        steps: Batches of about 4,096 tokens.
        course: ``recall`` or ``text``.
        longest: Tokens of the longest text that it is shown.
    """

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    steps: int
    course: str
    longest: int = 1024
    rate: float = 3e-3


PUPILS: Final = {
    pupil.name: pupil
    for pupil in (
        Pupil("recall", "llama", 128, 3, 2, 256, 3500, "recall", 512, rate=2e-3),
        Pupil("text-1m", "llama", 128, 4, 4, 1024, 1200, "text"),
        Pupil("text-2m", "llama", 192, 3, 3, 1024, 950, "text"),
        Pupil("text-4m", "llama", 256, 4, 4, 1024, 1100, "text"),
        Pupil("text-gpt2", "gpt2", 128, 4, 4, 1024, 1100, "text"),
    )
}


def make_model(pupil: Pupil) -> Any:
    """A transformers model of this shape with random weights."""
    return _gpt2(pupil) if pupil.family == "gpt2" else _llama(pupil)


def _llama(pupil: Pupil) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=pupil.vocabulary,
        hidden_size=pupil.hidden,
        intermediate_size=3 * pupil.hidden,
        num_hidden_layers=pupil.layers,
        num_attention_heads=pupil.heads,
        num_key_value_heads=pupil.heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": _BASE},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def _gpt2(pupil: Pupil) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=pupil.vocabulary,
        n_embd=pupil.hidden,
        n_layer=pupil.layers,
        n_head=pupil.heads,
        n_positions=pupil.longest,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)
