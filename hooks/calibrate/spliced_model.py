"""``SplicedModel``: a Hugging Face model that reads keys and values from other positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from ...graph.errors import ConfigError
from ...kernels.maths.quant import dequantize, quantize
from ...kernels.maths.rope import Rope

Tensor: TypeAlias = torch.Tensor
Layers: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values by layer, each [1, heads, tokens, dims]."""

_SHIFT: Final = 37  # positions; chosen: no multiple of anything
_MOST_ERROR: Final = 0.02  # relative, of a rotated key; bfloat16 alone has .004; chosen


@dataclass(frozen=True)
class SplicedModel:
    """A causal language model, and how its keys are moved.

    Attributes:
        model: From ``transformers``, in evaluation mode.
        rope: The rotation of its keys.
    """

    model: Any
    rope: Rope

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def states(self, ids: Tensor, start: int = 0, before: Layers | None = None) -> Layers:
        """Keys and values of ``ids``, int64 [tokens], from position ``start`` on.

        Args:
            before: Keys and values of all that stands before them, if anything does.
        """
        out = self._run(ids, start, before)
        known = _tokens(before)
        return [
            (layer.keys[:, :, known:], layer.values[:, :, known:])
            for layer in out.past_key_values.layers
        ]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def logits(self, ids: Tensor, before: Layers | None = None) -> Tensor:
        """Logits of the tokens after each of ``ids``, float32 [tokens, vocabulary].

        Args:
            ids: int64 [tokens].
            before: Keys and values of all that stands before them.
        """
        logits: Tensor = self._run(ids, _tokens(before), before).logits[0].float()
        return logits

    def moved(self, layers: Layers, delta: int, int8: bool = False) -> Layers:
        """Keys and values as a splice brings them to positions that are ``delta`` further on.

        Args:
            int8: Whether the copy that they are read from is kept in int8.
        """
        return [
            (self._turned(_kept(keys, int8), delta), _kept(values, int8)) for keys, values in layers
        ]

    def check_rotation(self, ids: Tensor) -> None:
        """Compare keys that were moved with keys that were computed there, in every layer.

        Raises:
            ConfigError: They differ: the model does not rotate all its keys as its configuration
                says.
        """
        moved, there = self.moved(self.states(ids), _SHIFT), self.states(ids, _SHIFT)
        for number, ((got, _), (wanted, _)) in enumerate(zip(moved, there, strict=True)):
            error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            if not error <= _MOST_ERROR:
                raise ConfigError(
                    f"keys of layer {number} do not rotate as this model's configuration says "
                    f"(relative error {error:.3f}): they cannot be moved to other positions"
                )

    def _run(self, ids: Tensor, start: int, before: Layers | None) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, (keys, values) in enumerate(before or ()):
            cache.update(keys, values, number)
        places = torch.arange(start, start + len(ids), device=ids.device)
        return self.model(
            input_ids=ids[None], position_ids=places[None], past_key_values=cache, use_cache=True
        )

    def _turned(self, keys: Tensor, delta: int) -> Tensor:
        """As the kernels do it: in float32, rounded once."""
        deltas = torch.full((keys.shape[2],), delta, dtype=torch.int64, device=keys.device)
        cos, sin = self.rope.rotation(deltas)
        turned = self.rope.rotate(keys[0].transpose(0, 1).float(), cos, sin)
        return turned.transpose(0, 1)[None].to(keys.dtype)


def part(layers: Layers, first: int, end: int) -> Layers:
    """Keys and values of the tokens ``[first, end)``."""
    return [(keys[:, :, first:end], values[:, :, first:end]) for keys, values in layers]


def joined(parts: Sequence[Layers]) -> Layers:
    """Keys and values of parts that follow each other."""
    return [
        (torch.cat([keys for keys, _ in layer], 2), torch.cat([values for _, values in layer], 2))
        for layer in zip(*parts, strict=True)
    ]


def _tokens(layers: Layers | None) -> int:
    return int(layers[0][0].shape[2]) if layers else 0


def _kept(states: Tensor, int8: bool) -> Tensor:
    return dequantize(*quantize(states.float())).to(states.dtype) if int8 else states
