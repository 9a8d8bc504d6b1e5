"""Inverse frequencies against transformers' own, and what cannot be moved is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvgraph.kernels.errors import RopeError
from kvgraph.kernels.rope import Pairing, rope_from_config
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config(**rope: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=rope.pop("longest", 131072),
        rope_parameters={"rope_theta": 500000.0, **rope},
    )  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "linear", "factor": 3.0}, LLAMA3, YARN,
     {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
     {**YARN, "partial_rotary_factor": 0.5}],
    ids=["linear", "llama3", "yarn", "yarn-betas", "yarn-partial"],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    model = config(**rope)
    theirs, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model, "cpu")
    mine = rope_from_config(model).inv_freq
    assert mine.dtype == torch.float64
    torch.testing.assert_close(mine.float(), theirs, rtol=2e-6, atol=0)


def test_default_and_partial_rotation() -> None:
    whole = rope_from_config(config(rope_type="default"))
    exact = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    torch.testing.assert_close(whole.inv_freq, exact, rtol=1e-6, atol=0)
    half = rope_from_config(config(rope_type="default", partial_rotary_factor=0.5))
    assert (whole.dims, half.dims, half.start) == (128, 64, 0)


def test_older_configurations_keep_their_settings_elsewhere() -> None:
    old = {
        "model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "rope_theta": 5e5,
        "max_position_embeddings": 131072, "rope_scaling": {**YARN, "type": "yarn"},
    }  # fmt: skip
    new = rope_from_config(config(**YARN))
    assert torch.equal(rope_from_config(old).inv_freq, new.inv_freq)


def test_mla_rotates_the_tail_of_the_latent_in_neighbouring_pairs() -> None:
    rope = rope_from_config({
        "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "rope_theta": 10000.0, "hidden_size": 7168, "num_attention_heads": 128,
    })  # fmt: skip
    assert (rope.start, rope.dims, rope.pairing) == (512, 64, Pairing.GPTJ)


def test_attention_factor_is_no_part_of_the_rotation() -> None:
    rope = rope_from_config(config(**YARN, attention_factor=1.7))
    cos, sin = rope.rotation(torch.tensor([12345]))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


@pytest.mark.parametrize(
    ("settings", "longest", "reason"),
    [
        ({"model_type": "bloom"}, None, "bloom.*ALiBi"),
        ({"model_type": "falcon", "alibi": True, "rope_theta": 1e4}, None, "falcon.*ALiBi"),
        ({"model_type": "gpt2"}, None, "gpt2.*learned"),
        ({"model_type": "t5"}, None, "t5.*no rope_theta"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192,
         "llama: dynamic NTK changes its frequencies beyond 4096.*8192"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}}, None,
         "phi3: LongRoPE.*4096.*unknown"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "linear"}}, None,
         "llama.*linear.*factor"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "spiral"}}, None,
         "llama.*spiral.*yarn"),
        ({"model_type": "gemma3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, None,
         "gemma3.*layer type.*full_attention"),
    ],
)  # fmt: skip
def test_refusals_name_model_and_reason(
    settings: dict[str, Any], longest: int | None, reason: str
) -> None:
    base: dict[str, Any] = {
        "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 4096
    }  # fmt: skip
    if "rope_scaling" in settings:
        base["rope_theta"] = 1e4
    with pytest.raises(RopeError, match=reason):
        rope_from_config(base | settings, max_model_len=longest)


def test_variants_that_cannot_change_within_the_served_length_are_accepted() -> None:
    for kind in (
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.5] * 64, "long_factor": [9.0] * 64},
    ):
        settings = {
            "model_type": "phi3", "hidden_size": 512, "num_attention_heads": 4, "rope_theta": 1e4,
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
            "rope_scaling": kind,
        }  # fmt: skip
        rope = rope_from_config(settings, max_model_len=4096)
        assert rope.inv_freq[0] == pytest.approx(1.0 if kind["rope_type"] == "dynamic" else 1 / 1.5)
