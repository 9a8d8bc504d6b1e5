"""``ConfKVCache``, to be passed to ``model.generate(..., past_key_values=…)``."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ...kernels.backends.attention import confidence_score
from . import attention
from .layer import AttentionAndRecency, ConfLayer, Ranker
from .settings import (
    Budgets,
    ByConfidence,
    ConfKVSettings,
    SettingsError,
    UnsupportedError,
    layer_shares,
)

LogitsCallback = Callable[[Any, Tensor], None]


class LogitsWatch:
    """Calls ``callback(cache, logits)`` after every forward pass whose output carries the cache.
    ``callback`` must not hold a reference to the cache.
    """

    def __init__(self, cache: Any, callback: LogitsCallback) -> None:
        # A cache is never told its model. So a hook on all modules looks for an output that
        # carries the cache, and is then replaced by a hook on that model; both go with the cache.
        self._cache = weakref.ref(cache)
        self._callback = callback
        self._handle: RemovableHandle = register_module_forward_hook(self._found)
        weakref.finalize(cache, self.stop)

    @property
    def listening(self) -> bool:
        hooks = self._handle.hooks_dict_ref()
        return hooks is not None and self._handle.id in hooks

    def stop(self) -> None:
        self._handle.remove()

    def _found(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        if self._notify(module, given, output):
            self._handle.remove()
            self._handle = module.register_forward_hook(self._notify_hook)

    def _notify_hook(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        self._notify(module, given, output)

    def _notify(self, module: torch.nn.Module, given: Any, output: Any) -> bool:
        """Call the callback, and return True, if the output has logits and carries our cache."""
        cache, logits = self._cache(), getattr(output, "logits", None)
        if cache is None or logits is None:
            return False
        if getattr(output, "past_key_values", None) is not cache:
            return False
        self._callback(cache, logits)
        return True


_DROP_CACHES: Final = ("phi3", "phimoe", "phi4_multimodal")  # see ``_drops_at``
_REMEMBERED: Final = 65_536  # steps of the trace; chosen: an hour of one chat

_log = logging.getLogger(__name__)


class Step(NamedTuple):
    confidence: tuple[float, ...]  # confidence in the next token, for each row of the batch
    budgets: tuple[int, ...]  # tokens that each row may keep in a layer of average depth
    held: float  # slots per layer after eviction, averaged over layers
    at: float  # Unix seconds


class ConfKVCache(Cache):  # type: ignore[misc]
    """A cache that keeps fewer tokens while the model is confident of its next one.

    ``model.generate(**inputs, past_key_values=ConfKVCache(model.config))`` is all that is needed.
    From then on the model's attention runs through a function of ours. For every other cache it
    does what ``sdpa`` does, and for this one too until a token is evicted.

    Attributes:
        trace: The most recent steps.
    """

    def __init__(
        self,
        config: Any,
        settings: ConfKVSettings | None = None,
        *,
        budgets: Budgets | None = None,
        ranker: Ranker | None = None,
    ) -> None:
        """Create the cache of a model.

        Args:
            config: The model's own ``config``, not a copy.
            settings: How much is kept; None for the defaults.
            budgets: Decides how many tokens are kept, instead of confidence.
            ranker: Decides which tokens are kept, instead of attention and recency.

        Raises:
            UnsupportedError: The model has attention that the cache cannot serve; names it.
            SettingsError: An argument is no configuration or no settings, or the pyramid leaves the
                last layer less than ``window + slack``.
        """
        self.settings = it = ConfKVSettings() if settings is None else settings
        _check_arguments(config, it)
        _check_model(config)
        _check_pyramid(it)
        self._budgets = budgets or ByConfidence(it)
        ranker = ranker or AttentionAndRecency(it.alpha, it.gamma, it.window)
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        shares = layer_shares(len(layers), it.pyramid)
        super().__init__(
            layers=[
                _served(layer, ConfLayer(it, share, ranker))
                for layer, share in zip(layers, shares, strict=True)
            ]
        )
        if not self._ours():
            raise UnsupportedError(f"every layer of {config.model_type} has a sliding window")
        self.trace: deque[Step] = deque(maxlen=_REMEMBERED)
        self._drops_at = _drops_at(config.get_text_config(decoder=True))
        # The model's attention runs through a function of ours from here on.
        attention.register()
        config.get_text_config(decoder=True)._attn_implementation = attention.NAME
        self._watch = LogitsWatch(self, ConfKVCache.observe)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfKVCache:
        """Refuse to copy, since a copy would receive no logits.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("ConfKVCache cannot be copied: make one for each answer")

    def reset(self) -> None:
        """Forget all tokens, and the trace."""
        super().reset()
        self.trace.clear()

    def observe(self, logits: Tensor) -> None:
        """Choose budgets by a step's logits [batch, tokens, vocabulary], and evict.

        A hook on the model calls it; call it yourself if the model runs without its head.
        """
        confidence = confidence_score(logits[:, -1]).tolist()
        budgets = self._budgets.choose(confidence)
        ours = self._ours()
        for layer in ours:
            layer.shrink(budgets)
        if self._drops_at is not None and ours[0].get_seq_length() >= self._drops_at:
            _log.warning(
                "at %d tokens the model gives up its cache: this one is not used from here on",
                self._drops_at,
            )
            self._drops_at = None
        held = sum(layer.table.held for layer in ours) / len(ours)
        self.trace.append(Step(tuple(confidence), tuple(budgets), held, time.time()))

    def held(self) -> list[int]:
        """Return the number of tokens held by each layer, in the row that holds most."""
        return [max(layer.table.valid) if layer.is_initialized else 0 for layer in self._ours()]

    def room(self) -> float:
        """Return the mean size of a layer's tokens, counted in tokens of 16-bit numbers."""
        ours = [layer for layer in self._ours() if layer.is_initialized]
        rows = [layer.store.room(held) for layer in ours for held in layer.table.valid]
        return sum(rows) / len(rows) if rows else 0.0

    def bytes(self) -> int:
        """Return the allocated bytes of keys and values."""
        return sum(layer.store.bytes() for layer in self._ours() if layer.is_initialized)

    def schedule(self) -> list[tuple[int, ...]]:
        """Return the budgets of each step, for ``Replayed``."""
        return [step.budgets for step in self.trace]

    def _ours(self) -> Sequence[ConfLayer]:
        return [layer for layer in self.layers if isinstance(layer, ConfLayer)]


def _served(layer: Any, ours: ConfLayer) -> Any:
    """Our layer in place of a plain one; transformers' own for one with a sliding window."""
    if type(layer) is DynamicLayer:
        return ours
    if type(layer) is DynamicSlidingWindowLayer:
        return layer
    raise UnsupportedError(f"ConfKVCache does not know a layer like {type(layer).__name__}")


def _check_arguments(config: Any, settings: Any) -> None:
    if not isinstance(config, PretrainedConfig):
        raise SettingsError(f"config is a {type(config).__name__}; pass model.config")
    if not isinstance(settings, ConfKVSettings):
        raise SettingsError(f"settings is a {type(settings).__name__}; allowed: ConfKVSettings")


def _check_model(config: Any) -> None:
    kind = config.model_type
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UnsupportedError(f"ConfKVCache does not serve {kind}: it has cross-attention")
    if getattr(config, "reorder_and_upcast_attn", False):
        raise UnsupportedError(f"ConfKVCache does not serve {kind} with reorder_and_upcast_attn")
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedError(
            f"ConfKVCache does not serve {kind}: its cache holds latents (kv_lora_rank = "
            f"{text.kv_lora_rank}), of which attention makes its keys and values anew"
        )
    drops_at = _drops_at(text)
    if drops_at is not None and text.max_position_embeddings > drops_at:
        raise UnsupportedError(
            f"ConfKVCache does not serve {kind} beyond {drops_at} tokens, where the model gives up "
            "its cache (original_max_position_embeddings); for shorter texts, set "
            f"max_position_embeddings = {drops_at} in model.config"
        )
    chosen = config._attn_implementation
    if chosen not in (None, attention.REPLACED, attention.NAME):
        raise UnsupportedError(
            f"ConfKVCache stands in for sdpa attention, and {kind} runs {chosen}: load the model "
            "with attn_implementation='sdpa'"
        )


def _drops_at(text: Any) -> int | None:
    """Return the text length at which the model drops its cache for other rotary factors."""
    drops = text.model_type in _DROP_CACHES
    return getattr(text, "original_max_position_embeddings", None) if drops else None


def _check_pyramid(it: ConfKVSettings) -> None:
    least = it.low * (1.0 - it.pyramid)
    if least < it.window + it.slack:
        raise SettingsError(
            f"pyramid = {it.pyramid} leaves the last layer {least:.0f} tokens; allowed: "
            f"{it.window + it.slack} and more (window + slack)"
        )
