"""A model that follows a given text, token by token, with a cache that forgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


class Followed(NamedTuple):
    surprise: Floats  # [texts, tokens behind the prompt], nats
    right: NDArray[np.bool_]  # bool, the same shape: whether the token was the model's first choice
    confidence: Floats  # [texts, tokens behind the prompt], of the logits that judged each
    # [tokens behind the prompt], what a layer held on average, in tokens of two bytes a number:
    # one in int8 counts half
    room: Floats
    peak: int  # bytes of keys and values, allocated at once


def follow(model: Any, texts: Tensor, prompt: int, cache: ConfKVCache) -> Followed:
    """Read ``prompt`` tokens of the texts [texts, tokens] at once and the rest one by one."""
    surprise, right, room, peak = [], [], [], 0
    with torch.inference_mode():
        logits = model(texts[:, :prompt], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        for at in range(prompt, texts.shape[1]):
            nats, first = _judged(logits, texts[:, at])
            surprise.append(nats)
            right.append(first)
            room.append(cache.room())
            peak = max(peak, cache.bytes())
            if at + 1 < texts.shape[1]:
                logits = model(texts[:, at : at + 1], past_key_values=cache).logits[:, -1]
    confidence = [step.confidence for step in cache.trace]
    return Followed(
        np.stack(surprise, 1), np.stack(right, 1), np.array(confidence).T, np.array(room), peak
    )


def read_at_once(model: Any, texts: Tensor, prompt: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Surprise and first choices with nothing forgotten: one pass over the texts."""
    with torch.inference_mode():
        logits = model(texts, use_cache=False).logits[:, prompt - 1 : -1]
    nats, first = _judged(logits.flatten(0, 1), texts[:, prompt:].flatten())
    shape = (texts.shape[0], texts.shape[1] - prompt)
    return nats.reshape(shape), first.reshape(shape)


def _judged(logits: Tensor, target: Tensor) -> tuple[Floats, NDArray[np.bool_]]:
    nats = torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")
    return nats.double().numpy(), (logits.argmax(-1) == target).numpy()


MakeCache = Callable[[Any], ConfKVCache]
