"""Rotary position embedding, as needed to move a key: angles per pair of dimensions.

A key at position p is R(p)·k, a product of plane rotations by p·inv_freq; at p + Δ it is
R(Δ)·R(p)·k. So a move needs only Δ and the inverse frequencies. A factor that a model multiplies
into cos and sin (YaRN's attention factor) is in the stored key already and is not applied again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch

from .errors import RopeError
from .tensors import Tensor

# Models whose vLLM implementation rotates neighbouring dimensions; all others rotate halves.
GPTJ_MODELS: Final = frozenset({
    "gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "chatglm", "llama4", "llama4_text",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "ernie4_5", "ernie4_5_moe",
})  # fmt: skip
_REFUSED_KINDS: Final = {
    "bloom": "positions are ALiBi biases, not rotations of K",
    "mpt": "positions are ALiBi biases, not rotations of K",
    "gpt2": "positions are learned embeddings, which every layer's K and V depend on",
    "opt": "positions are learned embeddings, which every layer's K and V depend on",
    "gpt_bigcode": "positions are learned embeddings, which every layer's K and V depend on",
}

Settings = Mapping[str, Any]


class Pairing(Enum):
    """Which dimensions form a pair."""

    NEOX = "neox"  # i and i + half
    GPTJ = "gptj"  # 2i and 2i + 1


@dataclass(frozen=True)
class Rope:
    """The rotation of one attention layer's keys."""

    inv_freq: Tensor  # radians per position, one per pair; float64 [pairs]
    start: int = 0  # first rotated dimension of a cell (512 in DeepSeek's MLA latent)
    pairing: Pairing = Pairing.NEOX

    @property
    def dims(self) -> int:
        """Number of rotated dimensions, from ``start`` on."""
        return 2 * int(self.inv_freq.shape[0])

    def rotation(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of Δ·inv_freq, computed in float64; float32 [T, pairs]."""
        angle = delta.to(torch.float64)[:, None] * self.inv_freq[None, :].to(delta.device)
        return angle.cos().to(torch.float32), angle.sin().to(torch.float32)

    def rotate(self, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate keys, float [T, heads, dims of a cell], by cos and sin [T, pairs].

        Computed in the dtype of ``cos``: two products and one sum per value, not fused, so that
        every back end rounds alike.
        """
        out = key.clone()
        part = key[..., self.start : self.start + self.dims]
        first, second = self._pairs(part)
        turned_first, turned_second = self._pairs(out[..., self.start : self.start + self.dims])
        cos, sin = cos[:, None, :], sin[:, None, :]
        turned_first.copy_(first * cos - second * sin)
        turned_second.copy_(second * cos + first * sin)
        return out

    def _pairs(self, part: Tensor) -> tuple[Tensor, Tensor]:
        half = self.dims // 2
        if self.pairing is Pairing.NEOX:
            return part[..., :half], part[..., half:]
        return part[..., 0::2], part[..., 1::2]


def rope_from_config(config: Any, max_model_len: int | None = None) -> Rope:
    """Return the rotation that a model applies to the keys of all its layers.

    Args:
        config: A Hugging Face ``PretrainedConfig``, or its ``to_dict()``.
        max_model_len: Longest sequence that will ever be served, in tokens; None if unknown. Some
            variants change their frequencies beyond the trained length, and are refused unless
            sequences stay below it.

    Raises:
        RopeError: The model's positions are not rotations of its keys, or not of a known kind, or
            differ by layer, or may change while a key is kept.
    """
    model = _text_config(config)
    name = str(model.get("_name_or_path") or model.get("model_type") or "this model")
    _refuse_other_positions(model, name)
    settings = _settings(model, name)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind not in _VARIANTS:
        allowed = ", ".join(sorted(_VARIANTS))
        raise RopeError(f"{name}: rope type {kind!r} is not known; allowed: {allowed}")
    dims, start = _rotated(model, settings)
    try:
        # In float32, as the models themselves compute them.
        exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        base = 1.0 / (float(settings["rope_theta"]) ** exponents)
        inv_freq = _VARIANTS[kind](_Model(name, model, settings, max_model_len), base)
    except KeyError as missing:
        raise RopeError(f"{name}: rope type {kind!r} lacks the setting {missing}") from None
    pairing = Pairing.GPTJ if model.get("model_type") in GPTJ_MODELS else Pairing.NEOX
    return Rope(inv_freq.to(torch.float64), start, pairing)


@dataclass(frozen=True)
class _Model:
    """What a variant's formula may use."""

    name: str
    config: Settings
    settings: Settings
    max_model_len: int | None

    def trained_length(self) -> int:
        for source in (self.settings, self.config):
            if source.get("original_max_position_embeddings"):
                return int(source["original_max_position_embeddings"])
        return int(self.config["max_position_embeddings"])

    def require_no_change(self, variant: str) -> None:
        """Refuse a variant whose frequencies change when a sequence outgrows the trained length."""
        trained = self.trained_length()
        if self.max_model_len is None or self.max_model_len > trained:
            longest = "unknown" if self.max_model_len is None else self.max_model_len
            raise RopeError(
                f"{self.name}: {variant} changes its frequencies beyond {trained} positions, and a"
                f" key from before the change is not a rotation of one after it; longest sequence:"
                f" {longest}"
            )


def _default(model: _Model, inv_freq: Tensor) -> Tensor:
    return inv_freq


def _linear(model: _Model, inv_freq: Tensor) -> Tensor:
    return inv_freq / float(model.settings["factor"])


def _llama3(model: _Model, inv_freq: Tensor) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended."""
    factor = float(model.settings["factor"])
    low = float(model.settings["low_freq_factor"])
    high = float(model.settings["high_freq_factor"])
    trained = float(model.settings["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    stretched = torch.where(wavelength > trained / low, inv_freq / factor, blended)
    return torch.where(wavelength < trained / high, inv_freq, stretched)


def _yarn(model: _Model, inv_freq: Tensor) -> Tensor:
    """YaRN's frequencies (arXiv 2309.00071, section 3.2), without its attention factor."""
    settings, dims = model.settings, 2 * int(inv_freq.shape[0])
    theta, trained = float(settings["rope_theta"]), model.trained_length()
    factor = settings.get("factor") or model.config["max_position_embeddings"] / trained

    def border(rotations: float) -> float:
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = border(float(settings.get("beta_fast") or 32))
    high = border(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return inv_freq / float(factor) * stretched + inv_freq * (1 - stretched)


def _dynamic(model: _Model, inv_freq: Tensor) -> Tensor:
    model.require_no_change("dynamic NTK")
    return inv_freq


def _longrope(model: _Model, inv_freq: Tensor) -> Tensor:
    model.require_no_change("LongRoPE")
    return inv_freq / torch.tensor(model.settings["short_factor"], dtype=torch.float32)


_VARIANTS: Final[dict[str, Callable[[_Model, Tensor], Tensor]]] = {
    "default": _default,
    "mrope": _default,  # a segment moves by the same amount along all three axes
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
    "su": _longrope,
}


def _text_config(config: Any) -> Settings:
    if not isinstance(config, Mapping):
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return dict(text.to_dict())
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _refuse_other_positions(model: Settings, name: str) -> None:
    kind = str(model.get("model_type", ""))
    if model.get("alibi") or str(model.get("position_embedding_type", "")) == "alibi":
        raise RopeError(f"{name}: {_REFUSED_KINDS['bloom']}")
    if kind in _REFUSED_KINDS:
        raise RopeError(f"{name}: {_REFUSED_KINDS[kind]}")


def _settings(model: Settings, name: str) -> dict[str, Any]:
    """The rotation's settings, from either place that configurations use."""
    found = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if by_layer := sorted(key for key, value in found.items() if isinstance(value, Mapping)):
        raise RopeError(
            f"{name}: rotations differ by layer type ({', '.join(by_layer)}); supported: one for "
            "all layers"
        )
    settings = {"rope_theta": model.get("rope_theta"), **found}
    if settings["rope_theta"] is None:
        raise RopeError(
            f"{name}: there is no rope_theta in its configuration: positions are not rotations of K"
        )
    return settings


def _rotated(model: Settings, settings: Settings) -> tuple[int, int]:
    """How many dimensions of a cell are rotated, and the first of them."""
    if model.get("kv_lora_rank"):  # MLA: a latent vector, then the part with positions
        return int(model["qk_rope_head_dim"]), int(model["kv_lora_rank"])
    head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    share = settings.get("partial_rotary_factor") or model.get("partial_rotary_factor")
    share = share or model.get("rotary_pct") or 1.0
    if model.get("rotary_dim"):
        return int(model["rotary_dim"]), 0
    return int(head * float(share)), 0
