"""What ``kvpress`` keeps of prompts. Runs in an environment of its own, without kvgraph:

    python kvpress_kept.py MODEL_FOLDER PROMPTS.json KEPT.json

``kvpress`` chooses for each head; here the mean over heads decides for a layer, as in our cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from kvpress import ObservedAttentionPress, SnapKVPress, StreamingLLMPress  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM


class KeptByScore:
    """In the place of a press's ``compress``: evicts nothing, and remembers what would stay, a list
    for each layer.
    """

    def __init__(self, press: Any, keep: int, recent: int, queries: int = 0) -> None:
        self._score, self._keep, self._recent = press.score, keep, recent
        self._seen = torch.arange(queries, 0, -1) if queries else 1
        self.kept: list[list[int]] = []

    def __call__(
        self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        score = self._score(module, hidden, keys, values, attentions, kwargs)[0].mean(0)
        score = score * self._seen
        score[len(score) - self._recent :] = torch.inf
        self.kept.append(sorted(score.topk(self._keep).indices.tolist()))
        return keys, values


def main(model_folder: str, prompts: str, kept: str) -> None:
    """Read prompts, write positions: ``{arm: [prompt][layer][position]}``."""
    asked = json.loads(Path(prompts).read_text())
    keep, recent = asked["keep"], asked["recent"]
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found: dict[str, list[list[list[int]]]] = {}
    for tokens in asked["prompts"]:
        sinks_and_newest = 1.0 - (keep + 0.5) / len(tokens)
        presses = {
            "snapkv": SnapKVPress(window_size=recent, kernel_size=asked["pooled"]),
            "h2o": ObservedAttentionPress(),
            "streaming": StreamingLLMPress(compression_ratio=sinks_and_newest),
        }
        for arm, press in presses.items():
            queries = len(tokens) if arm == "h2o" else 0
            press.compress = by_score = KeptByScore(press, keep, recent, queries)
            with torch.inference_mode(), press(model):
                model(torch.tensor([tokens]), use_cache=True)
            found.setdefault(arm, []).append(by_score.kept)
    Path(kept).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
