"""Computing tokens' KV again instead of moving it: Llama's layers with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional


@dataclass(frozen=True)
class StackShape:
    """Sizes of a Llama; the defaults are the 8B's."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336


_EPSILON: Final = 1e-5


class PrefillStack:
    """Layers of their own weights in bf16: attention by torch's sdpa, gated MLP, no head.

    Rotary angles are taken once, outside of what is timed, as engines do.
    """

    def __init__(self, shape: StackShape, tokens: int, device: str) -> None:
        self._shape = shape
        kv = shape.kv_heads * shape.hidden // shape.heads
        rows = {
            "qkv": (shape.hidden + 2 * kv, shape.hidden), "out": (shape.hidden, shape.hidden),
            "up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }  # fmt: skip
        self._layers = [
            {name: _weight(*size, device) for name, size in rows.items()}
            for _ in range(shape.layers)
        ]
        half = shape.hidden // shape.heads // 2
        angle = torch.outer(torch.arange(tokens), 5e5 ** (-torch.arange(half) / half))
        self._cos = angle.cos().to(device, torch.bfloat16)
        self._sin = angle.sin().to(device, torch.bfloat16)

    def __call__(self, states: Any) -> Any:
        """Hidden states after all layers; bf16 [tokens, hidden]."""
        for weights in self._layers:
            states = states + self._attention(_norm(states), weights)
            states = states + _mlp(_norm(states), weights)
        return states

    def _attention(self, states: Any, weights: Any) -> Any:
        shape, tokens = self._shape, states.shape[0]
        dims = shape.hidden // shape.heads
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        parts = (states @ weights["qkv"].t()).view(tokens, -1, dims).split(sizes, dim=1)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        mixed = functional.scaled_dot_product_attention(
            self._turned(query), self._turned(key), value, is_causal=True, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(tokens, -1) @ weights["out"].t()

    def _turned(self, values: Any) -> Any:
        first, second = values.chunk(2, dim=-1)
        cos, sin = self._cos, self._sin
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mlp(states: Any, weights: Any) -> Any:
    gate, up = (states @ weights["up"].t()).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ weights["down"].t()


def _norm(states: Any) -> Any:
    return functional.rms_norm(states, states.shape[-1:], eps=_EPSILON)


def _weight(rows: int, columns: int, device: str) -> Any:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
