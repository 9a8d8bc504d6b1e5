"""Whether our rivals keep what ``kvpress`` keeps, of the same prompts by the same weights."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.layer import ConfLayer, Ranker
from kvgraph.hooks.confkv.settings import ConfKVSettings
from torch import Tensor

from ..errors import BenchError
from ..figures import Figures
from .confkv_arms import POOLED, STREAMING, HeavyHitters, SnapKV

KEPT: Final = 0.25  # of a prompt; chosen
RECENT: Final = 32  # newest tokens that stay: the queries that SnapKV looks at
_LONGEST_S: Final = 1800.0
ARMS: Final[dict[str, Ranker]] = {"snapkv": SnapKV(), "h2o": HeavyHitters(), "streaming": STREAMING}

Kept = list[list[list[int]]]  # positions, of each prompt and layer


def add_agreement(figures: Figures, model: Any, texts: Tensor, python: Path, prefix: str) -> None:
    keep = round(KEPT * texts.shape[1])
    theirs = _theirs(model, texts, keep, python)
    for arm, ranker in ARMS.items():
        ours = [_kept(model, prompt, keep, ranker) for prompt in texts]
        shares = agreement(ours, theirs[arm])
        figures.add(f"{prefix}kvpress_{arm}", shares, "of kept positions, a layer each", "1")


def agreement(ours: Kept, theirs: Kept) -> list[float]:
    """Share of kept positions that both keep, for each prompt and layer."""
    return [
        len(set(one) & set(other)) / len(one)
        for mine, yours in zip(ours, theirs, strict=True)
        for one, other in zip(mine, yours, strict=True)
    ]


def _kept(model: Any, prompt: Tensor, keep: int, ranker: Ranker) -> list[list[int]]:
    settings = ConfKVSettings(low=keep, high=keep, window=RECENT, slack=1)
    cache = ConfKVCache(model.config, settings, ranker=ranker)
    with torch.inference_mode():
        model(prompt[None], past_key_values=cache)
    return [
        layer.table.position[0].tolist() for layer in cache.layers if isinstance(layer, ConfLayer)
    ]


def _theirs(model: Any, texts: Tensor, keep: int, python: Path) -> dict[str, Kept]:
    with tempfile.TemporaryDirectory(prefix="kvpress-") as folder:
        prompts, kept, weights = (Path(folder, name) for name in ("asked", "kept", "model"))
        model.save_pretrained(weights)
        asked = {"keep": keep, "recent": RECENT, "pooled": POOLED, "prompts": texts.tolist()}
        prompts.write_text(json.dumps(asked))
        script = Path(__file__).with_name("kvpress_kept.py")
        _run([str(python), str(script), str(weights), str(prompts), str(kept)])
        found: dict[str, Kept] = json.loads(kept.read_text())
        return found


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{command[0]}: {error}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise BenchError(f"{why}; kvpress is installed by {command[0]} -m pip install kvpress")
