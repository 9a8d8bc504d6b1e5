"""How much the next token's distribution changes when the newest tokens are hidden from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from kvgraph.kernels.backends.attention import confidence_score
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

Floats = NDArray[np.float64]


class Ablated(NamedTuple):
    """Of each judged step: how sure the model was, and the divergence in nats; both [steps]."""

    confidence: Floats
    divergence: Floats


def ablate(model: Any, texts: Tensor, hidden: int, steps: int, seed: int) -> Ablated:
    """Hide the last ``hidden`` tokens from one query at a time, at random places of the texts.

    Everything else keeps the keys and values that it has with nothing hidden.

    Args:
        texts: [texts, tokens], longer than ``2 * hidden``.
        steps: Queries in all.
    """
    random = np.random.default_rng(seed)
    each = -(-steps // len(texts))
    found = [_of_text(model, text, hidden, each, random) for text in texts]
    confidence, divergence = (np.concatenate(column)[:steps] for column in zip(*found, strict=True))
    return Ablated(confidence, divergence)


def _of_text(
    model: Any, text: Tensor, hidden: int, count: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(text[None], past_key_values=cache).logits[0].float()
        places = torch.from_numpy(random.integers(2 * hidden, len(text), size=count))
        without = torch.cat([_hidden_from(model, text, cache, p, hidden) for p in places.split(32)])
        full = logits[places].log_softmax(-1)
        divergence = (full.exp() * (full - without.log_softmax(-1))).sum(-1)
        confidence = confidence_score(logits[places])
    return confidence.double().numpy(), divergence.double().numpy()


def _hidden_from(model: Any, text: Tensor, cache: Any, places: Tensor, hidden: int) -> Tensor:
    """Logits [places, vocabulary] of tokens that do not see the ``hidden`` ones before them."""
    rows, tokens = len(places), len(text)
    repeated = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        repeated.update(
            layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1), number
        )
    slot = torch.arange(tokens + 1)
    visible = (slot < places[:, None] - hidden) | (slot == tokens)  # itself is the last slot
    mask = torch.zeros(rows, 1, 1, tokens + 1).masked_fill(
        ~visible[:, None, None], torch.finfo(torch.float32).min
    )
    output = model(
        text[places][:, None], past_key_values=repeated, attention_mask=mask,
        position_ids=places[:, None],
    )  # fmt: skip
    return torch.as_tensor(output.logits[:, -1].float())
