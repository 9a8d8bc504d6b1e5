"""The cache under transformers' own ``generate``, on models of three families."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import kvgraph
import pytest
import torch
from kvgraph.hooks.confkv import attention
from kvgraph.hooks.confkv.cache import LogitsWatch
from kvgraph.hooks.confkv.layer import AttentionAndRecency, ConfLayer
from kvgraph.hooks.confkv.settings import ConfKVSettings, UnsupportedError
from random_models import FAMILIES, Replayed, random_model
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    T5Config,
)

TIGHT = ConfKVSettings(low=24, high=40, window=8, slack=4)
NEVER_SURE, ALWAYS_SURE = ConfKVSettings(tau=1.0), ConfKVSettings(tau=0.0)


@pytest.fixture
def llama() -> Any:
    return random_model("llama")


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param)


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(4))


def generated(model: Any, prompt: torch.Tensor, cache: Any, tokens: int = 60, **more: Any) -> Any:
    return model.generate(
        prompt, past_key_values=cache, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **more,
    )  # fmt: skip


def same_bits(one: Any, other: Any) -> bool:
    return torch.equal(one.sequences, other.sequences) and all(
        torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True)
    )


@pytest.mark.parametrize("settings", [ConfKVSettings(), NEVER_SURE, ALWAYS_SURE])
def test_below_the_budget_every_bit_is_that_of_a_plain_cache(
    model: Any, prompt: torch.Tensor, settings: ConfKVSettings
) -> None:
    plain = generated(model, prompt, DynamicCache(config=model.config))
    cache = kvgraph.ConfKVCache(model.config, settings)
    assert same_bits(generated(model, prompt, cache), plain)
    assert cache.held() == [79, 79, 79]


@pytest.mark.parametrize("int8", [False, True])
def test_a_long_answer_stays_within_the_high_budget(
    model: Any, prompt: torch.Tensor, int8: bool
) -> None:
    cache = kvgraph.ConfKVCache(model.config, replace(TIGHT, int8=int8))
    answer = generated(model, prompt, cache, 120)
    assert answer.sequences.shape == (2, 140)
    assert cache.get_seq_length() == 139  # positions go on
    assert max(step.held for step in cache.trace) <= 44
    assert len(cache.trace) == 120


def test_it_reads_what_a_full_cache_reads_with_what_was_evicted_hidden(model: Any) -> None:
    prompt, layers = torch.arange(1, 61)[None], model.base_model
    stack = layers.h if hasattr(layers, "h") else layers.layers
    del stack[1:]  # one layer, so that one mask says what was evicted
    model.config.num_hidden_layers = 1
    cache, plain = kvgraph.ConfKVCache(model.config, TIGHT), DynamicCache(config=model.config)
    with torch.no_grad():
        for each in (cache, plain):
            model(prompt, past_key_values=each)
        kept = torch.zeros(1, 1, 1, 61, dtype=torch.bool)
        kept[..., cache.layers[0].table.position[0]] = kept[..., 60] = True
        assert kept.sum() == 41
        one, full = (
            model(prompt[:, :1], past_key_values=each, attention_mask=mask,
                  position_ids=torch.tensor([[60]])).logits
            for each, mask in ((cache, None), (plain, kept))
        )  # fmt: skip
    assert torch.allclose(one, full, atol=1e-5)


@pytest.mark.parametrize("int8", [False, True])
def test_memory_follows_what_is_held(llama: Any, int8: bool) -> None:
    """A short text takes little, and what was held for a while is given back."""
    settings = replace(TIGHT, high=400, int8=int8)
    cache = kvgraph.ConfKVCache(llama.config, settings, budgets=Replayed([(400,)] * 300 + [(24,)]))
    taken = []
    with torch.no_grad():
        for token in range(304):
            llama(torch.tensor([[token % 97]]), past_key_values=cache)
            taken.append(cache.bytes() / cache.held()[0])
    full = 2 * 3 * 2 * 16 * 4 / (4 if int8 else 1)  # bytes of a token: planes, layers, heads, dims
    assert cache.held() == [24, 24, 24]
    assert max(taken[100:303]) <= (2.0 if int8 else 1.26) * full
    assert cache.bytes() <= 44 * full * (2.5 if int8 else 1.0)


def test_a_sure_model_keeps_the_low_budget(llama: Any, prompt: torch.Tensor) -> None:
    cache = kvgraph.ConfKVCache(llama.config, replace(TIGHT, tau=0.0))
    generated(llama, prompt, cache, 120)
    held = [step.held for step in cache.trace]
    assert max(held) <= 28
    assert {step.budgets for step in cache.trace} == {(24, 24)}
    assert any(later < earlier for earlier, later in pairwise(held))  # sawtooth


def test_a_prompt_longer_than_the_budget_is_cut_to_it(llama: Any) -> None:
    prompt = torch.arange(1, 91)[None]
    cache = kvgraph.ConfKVCache(llama.config, TIGHT)
    small = kvgraph.ConfKVCache(llama.config, TIGHT)
    generated(llama, prompt, cache, 30)
    generated(llama, prompt[:, :20], small, 30)
    assert max(cache.held()) <= 44
    assert cache.bytes() == small.bytes()  # the room for the prompt was given back


def test_rows_of_a_batch_do_not_know_of_each_other(llama: Any) -> None:
    long = torch.arange(1, 41)[None]
    short = torch.arange(50, 75)[None]
    padded = torch.cat([torch.zeros(1, 15, dtype=torch.long), short], 1)
    both = torch.cat([long, padded])
    mask = (both != 0).long()
    cache = kvgraph.ConfKVCache(llama.config, TIGHT)
    together = generated(llama, both, cache, 60, attention_mask=mask)
    for row, alone in ((0, long), (1, short)):
        own = kvgraph.ConfKVCache(llama.config, TIGHT)
        answer = generated(llama, alone, own, 60)
        assert torch.equal(answer.sequences[0, alone.shape[1] :], together.sequences[row, 40:])
        shift = 40 - alone.shape[1]
        kept = cache.layers[1].table.position[row]
        assert torch.equal(kept[kept >= 0] - shift, own.layers[1].table.position[0])


def test_padding_does_not_dilute_what_a_prompt_looked_at(llama: Any) -> None:
    short = torch.arange(50, 56)[None]
    padded = torch.cat([torch.zeros(1, 34, dtype=torch.long), short], 1)
    both = torch.cat([torch.arange(1, 41)[None], padded])
    together, alone = (kvgraph.ConfKVCache(llama.config) for _ in range(2))
    with torch.no_grad():
        llama(both, past_key_values=together, attention_mask=(both != 0).long())
        llama(short, past_key_values=alone)
    theirs, own = together.layers[1].table.memory[1, 34:], alone.layers[1].table.memory[0]
    torch.testing.assert_close(theirs, own)


def test_a_long_second_prompt_is_read_in_pieces_and_reads_the_same(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    turns = [torch.randint(1, 97, (1, tokens), generator=generator) for tokens in (60, 150, 40)]
    read = []
    for at_once in (8, 1000):
        monkeypatch.setattr(attention, "AT_ONCE", at_once)
        cache = kvgraph.ConfKVCache(llama.config, TIGHT)
        with torch.no_grad():
            logits = [llama(turn, past_key_values=cache).logits for turn in turns]
        read.append((torch.cat(logits, 1), cache.layers[1].table.position))
    torch.testing.assert_close(read[0][0], read[1][0])
    assert torch.equal(read[0][1], read[1][1])


def test_autocast_is_served_and_a_copy_refused(llama: Any, prompt: torch.Tensor) -> None:
    cache = kvgraph.ConfKVCache(llama.config, TIGHT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generated(llama, prompt, cache, 40)
    assert max(cache.held()) <= 44
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(cache)
    cache.reset()
    assert (len(cache.trace), cache.get_seq_length()) == (0, 0)
    cache.batch_select_indices(torch.tensor([0]))  # nothing is there yet


def test_beams_take_their_tokens_with_them(llama: Any, prompt: torch.Tensor) -> None:
    plain = generated(llama, prompt, DynamicCache(config=llama.config), num_beams=3)
    cache = kvgraph.ConfKVCache(llama.config)
    assert torch.equal(generated(llama, prompt, cache, num_beams=3).sequences, plain.sequences)
    tight = kvgraph.ConfKVCache(llama.config, TIGHT)
    generated(llama, prompt, tight, num_beams=3)
    assert max(tight.held()) <= 44


def test_a_chat_goes_on_with_the_cache_it_has(llama: Any, prompt: torch.Tensor) -> None:
    cache = kvgraph.ConfKVCache(llama.config, TIGHT)
    first = generated(llama, prompt, cache, 60).sequences
    second = generated(llama, torch.cat([first, prompt], 1), cache, 20)
    assert second.sequences.shape == (2, 120)
    assert cache.get_seq_length() == 119
    assert max(cache.held()) <= 44


def test_sliding_layers_stay_what_they_are(prompt: torch.Tensor) -> None:
    torch.manual_seed(3)
    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
    config = made("qwen2", num_hidden_layers=4, num_key_value_heads=2, **sliding)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = generated(model, prompt, DynamicCache(config=model.config))
    cache = kvgraph.ConfKVCache(model.config)
    assert same_bits(generated(model, prompt, cache), plain)
    assert len(cache.held()) == 2


def test_other_caches_run_as_before_on_a_model_that_had_ours(
    llama: Any, prompt: torch.Tensor
) -> None:
    plain = generated(llama, prompt, DynamicCache(config=llama.config))
    generated(llama, prompt, kvgraph.ConfKVCache(llama.config, TIGHT))
    assert same_bits(generated(llama, prompt, DynamicCache(config=llama.config)), plain)


def test_hooks_go_with_the_cache(llama: Any, prompt: torch.Tensor) -> None:
    cache = kvgraph.ConfKVCache(llama.config, TIGHT)
    generated(llama, prompt, cache, 10)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_a_watch_ends_with_what_it_watches(llama: Any, prompt: torch.Tensor) -> None:
    heard: list[torch.Size] = []
    cache = DynamicCache(config=llama.config)
    watch = LogitsWatch(cache, lambda cache, logits: heard.append(logits.shape))
    with torch.no_grad():
        llama(prompt, past_key_values=DynamicCache(config=llama.config))
        llama(prompt, past_key_values=cache)
        llama(prompt[:, :1], past_key_values=cache)
    assert heard == [(2, 20, 97), (2, 1, 97)]
    assert watch.listening
    del cache
    gc.collect()
    assert not watch.listening


MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
       "v_head_dim": 12, "num_key_value_heads": 4}  # fmt: skip
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu")


def made(kind: str, **more: Any) -> Any:
    """A configuration of a model of a few numbers."""
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": None}  # fmt: skip
    return CONFIG_MAPPING[kind](**{**shape, "max_position_embeddings": 512, **more})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5Config(), "t5: it has cross-attention"),
        (made("llama", attn_implementation="eager"), "llama runs eager"),
        (made("mistral", num_key_value_heads=2, sliding_window=16),
         "every layer of mistral has a sliding window"),
        *((made(kind, **MLA), f"{kind}: its cache holds latents") for kind in LATENT),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_models_that_it_cannot_serve_are_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        kvgraph.ConfKVCache(config)


def test_a_mask_with_a_bias_is_refused_by_name() -> None:
    """Its tokens would count as padding, and none as held."""
    config = made("doge", num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with pytest.raises(UnsupportedError, match="a bias in its mask"):
        generated(model, torch.arange(3, 43)[None], kvgraph.ConfKVCache(model.config, TIGHT), 2)


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_a_model_that_gives_up_its_cache_is_refused_by_name(kind: str) -> None:
    config = made(kind, num_key_value_heads=2)
    config.original_max_position_embeddings = 64
    with pytest.raises(UnsupportedError, match=f"{kind} beyond 64 tokens"):
        kvgraph.ConfKVCache(config)
    config.max_position_embeddings = 64
    kvgraph.ConfKVCache(config)


def test_where_a_model_gives_up_its_cache_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = made("phi3", num_key_value_heads=2, max_position_embeddings=64,
                  original_max_position_embeddings=64, rope_scaling=LONG_ROPE)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    short = torch.arange(3, 43)[None]
    generated(model, short, kvgraph.ConfKVCache(model.config, TIGHT), 20)
    assert "gives up its cache" not in caplog.text
    cache = kvgraph.ConfKVCache(model.config, TIGHT)
    generated(model, short, cache, 40)
    assert caplog.text.count("at 64 tokens the model gives up its cache") == 1
    assert cache.get_seq_length() == 64


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("width", [8, 24])
def test_values_may_be_of_another_width_than_keys(int8: bool, width: int) -> None:
    """What is read after an eviction is what full attention reads of the tokens that stay."""
    draw = torch.Generator().manual_seed(1)
    settings = replace(TIGHT, int8=int8)
    ranker = AttentionAndRecency(settings.alpha, settings.gamma, settings.window)
    layer, module = ConfLayer(settings, 1.0, ranker), torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    keys, values = torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, width)
    for count in (30, *[1] * 40):
        query = torch.randn(1, 4, count, 16, generator=draw)
        key = torch.randn(1, 2, count, 16, generator=draw)
        value = torch.randn(1, 2, count, width, generator=draw)
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        before = layer.table.position[0].tolist() if layer.is_initialized else []
        with torch.no_grad():
            mask = torch.ones(1, 1, count, count, dtype=torch.bool).tril() if count > 1 else None
            read, _ = attention.conf_attention(
                module, query, *layer.update(key, value), attention_mask=mask
            )
        assert read.shape == (1, count, 4, width)
        seen = [at for at in before if at >= 0] + [keys.shape[2] - 1]
        if count == 1:
            mass = (query.unflatten(1, (2, 2)) @ keys[:, :, None, seen].mT / 4).softmax(-1)
            wanted = (mass @ values[:, :, None, seen]).flatten(1, 2).transpose(1, 2)
            torch.testing.assert_close(read, wanted, atol=0.1 if int8 else 1e-5, rtol=1e-4)
    assert len(seen) < 50


def test_calls_it_cannot_serve_are_refused_by_name(llama: Any, prompt: torch.Tensor) -> None:
    cache = kvgraph.ConfKVCache(llama.config, TIGHT)
    with pytest.raises(UnsupportedError, match="no_grad"):
        llama(prompt, past_key_values=cache)
    with pytest.raises(UnsupportedError, match="cropped"):
        cache.crop(-1)


@pytest.mark.large  # compiling takes ten seconds
def test_a_compiled_model_reads_the_same(llama: Any, prompt: torch.Tensor) -> None:
    plain = generated(llama, prompt, kvgraph.ConfKVCache(llama.config, TIGHT), 40)
    llama.compile(backend="eager")
    cache = kvgraph.ConfKVCache(llama.config, TIGHT)
    compiled = generated(llama, prompt, cache, 40)
    assert torch.equal(compiled.sequences, plain.sequences)
    assert len(cache.trace) == 40


def test_a_cache_of_a_copied_configuration_is_refused(llama: Any, prompt: torch.Tensor) -> None:
    with torch.no_grad():
        cache = kvgraph.ConfKVCache(type(llama.config)(**llama.config.to_dict()), TIGHT)
        llama(prompt, past_key_values=cache)
        with pytest.raises(UnsupportedError, match="own configuration object"):
            llama(prompt, past_key_values=cache)
