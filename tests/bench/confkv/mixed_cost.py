"""What attention over a mixed cache costs beside dense attention, and eviction beside a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.layer import ConfLayer
from kvgraph.hooks.confkv.settings import ConfKVSettings
from kvgraph.kernels.backends.mixed import KvPart
from kvgraph.kernels.ops import mixed_attention
from kvgraph.kernels.quant import channel_scale, dequantize, from_cells, quantize, to_cells
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, HEADS, KV_HEADS, DIMS, TOKENS, RECENT = 8, 8, 4, 64, 512, 64
_ROUNDS: Final = 60
_LARGER: Final = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12,
}  # fmt: skip
_LARGER_ROUNDS: Final = 4  # evictions


def attention_ratios() -> list[float]:
    """Time of mixed tiled attention over that of dense sdpa, at the same length, in turns.

    Eight rows, eight query heads on four of keys, 512 tokens of which 64 are not in int8. The mixed
    one also says how much attention each token got.
    """
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(BATCH, HEADS, 1, DIMS, generator=generator)
    keys, values = (
        torch.randn(BATCH, KV_HEADS, TOKENS, DIMS, generator=generator) for _ in range(2)
    )
    parts = [_old(keys, values), KvPart(keys[:, :, -RECENT:], values[:, :, -RECENT:])]

    def dense() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, enable_gqa=True
        )

    def mixed() -> Tensor:
        return mixed_attention(query, parts, None, DIMS**-0.5).output

    for _ in range(5):
        dense()
        mixed()
    return [_seconds(mixed) / _seconds(dense) for _ in range(_ROUNDS)]


def _old(keys: Tensor, values: Tensor) -> KvPart:
    old = [plane[:, :, :-RECENT] for plane in (keys, values)]
    scales = [channel_scale(plane) for plane in old]
    cells = [to_cells(plane, scale) for plane, scale in zip(old, scales, strict=True)]
    return KvPart(cells[0], cells[1], scales[0], scales[1])


def eviction_share(
    model: Any, texts: Tensor, prompt: int, make: Callable[[], ConfKVCache]
) -> float:
    """Share of a step that goes into eviction and what is known of tokens, timed in place."""
    cache = make()
    spent, inside = [0.0], [False]
    for layer in [each for each in cache.layers if isinstance(each, ConfLayer)]:
        for name in ("note", "shrink", "arrived"):
            setattr(layer, name, _timed(getattr(layer, name), spent, inside))
    with torch.inference_mode():
        model(texts[:, :prompt], past_key_values=cache)
        spent[0], began = 0.0, time.perf_counter()
        for at in range(prompt, texts.shape[1]):
            model(texts[:, at : at + 1], past_key_values=cache)
        return spent[0] / (time.perf_counter() - began)


def eviction_share_of_a_larger_model() -> float:
    """The same of a Llama of a hundred million parameters with random weights, never sure.

    A small model's step is mostly Python. Texts begin at the high budget, so that tokens are
    evicted throughout.
    """
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**_LARGER)).eval()
    settings = ConfKVSettings()
    steps = _LARGER_ROUNDS * settings.slack
    texts = torch.randint(1, _LARGER["vocab_size"], (BATCH, settings.high + steps))
    return eviction_share(model, texts, settings.high, lambda: ConfKVCache(model.config, settings))


def int8_errors(keys: Tensor) -> tuple[float, float, float]:
    """Errors of int8 on real keys [batch, heads, tokens, dims].

    Returns:
        The largest error of a scale per channel, in its steps; its root mean square as a share of
        the keys'; and that of a scale per token.
    """
    keys = keys.float()
    scale = channel_scale(keys)
    error = from_cells(to_cells(keys, scale), scale) - keys
    by_token = dequantize(*quantize(keys)) - keys
    size = float(keys.square().mean().sqrt())
    worst = float((error.abs() / scale[:, :, None]).max())
    return worst, _rms(error) / size, _rms(by_token) / size


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


def _timed(
    action: Callable[..., Any], spent: list[float], inside: list[bool]
) -> Callable[..., Any]:
    """The action; what it takes is added up, once where one calls another."""

    def run(*args: Any) -> Any:
        if inside[0]:
            return action(*args)
        inside[0], began = True, time.perf_counter()
        try:
            return action(*args)
        finally:
            inside[0] = False
            spent[0] += time.perf_counter() - began

    return run


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
