"""A picture of one run: how sure the model was, and how many tokens a layer held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kvgraph.hooks.confkv.settings import ConfKVSettings
from torch import Tensor

from .confkv_arms import confident


def draw(model: Any, text: Tensor, it: ConfKVSettings, to: Path) -> None:
    """Let the model go on from ``text`` [tokens] by its own choices, and draw the cache's trace."""
    from matplotlib import pyplot

    cache = confident(model.config, it)
    torch.manual_seed(1)
    with torch.inference_mode():
        model.generate(
            text[None], past_key_values=cache, max_new_tokens=3 * len(text), do_sample=True,
            pad_token_id=0,
        )  # fmt: skip
    steps = list(cache.trace)
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 4), sharex=True)
    above.plot([step.held for step in steps], linewidth=0.8)
    above.axhline(it.high, color="grey", linewidth=0.6)
    above.axhline(it.low, color="grey", linewidth=0.6)
    above.set_ylabel("tokens a layer")
    below.plot([step.confidence[0] for step in steps], linewidth=0.5)
    below.axhline(it.tau, color="grey", linewidth=0.6)
    below.set_ylabel("confidence")
    below.set_xlabel("steps of one answer")
    figure.tight_layout()
    figure.savefig(to, dpi=110, metadata={"Software": None})
