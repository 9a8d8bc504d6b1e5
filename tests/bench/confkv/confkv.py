"""``kvgraph bench confkv``: what the cache keeps, what that costs, and beside whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.settings import ConfKVSettings
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

from ..figures import Figures
from ..paper.quiet import only_errors
from ..teaching.recall_exam import examine
from .ablation import ablate
from .confkv_arms import STATIC, confident
from .confkv_texts import documents, windows
from .independent.kvpress_agreement import add_agreement
from .mixed_cost import (
    attention_ratios,
    eviction_share,
    eviction_share_of_a_larger_model,
    int8_errors,
)
from .perplexity import Perplexity
from .resampled import falls_over_bins, pearson, wilson
from .sawtooth import draw
from .small_models import FAMILIES, Loaded, load, random_model, shipped
from .sweeps import add_sweeps
from .tasks.needles import add_needles, add_recalled
from .tasks.pages import add_pages

Say = Callable[[str], None]


_BUDGETS: Final = ConfKVSettings(low=64, high=256, window=32, slack=8)


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes, scaled to small models: a text has 1,024 tokens where the paper's have 4,096.

    Attributes:
        texts: Held-out windows; three seeds choose their thirds.
        length: Tokens of a window.
        prompt: Of which so many are read at once.
        steps: Of the ablation.
        part: ``all`` or one of ``PARTS``: ``hidden`` is the ablation, ``pages`` the agents.
        picture: Where the trace of one answer is drawn, if anywhere.
        kvpress: Python of an environment with ``kvpress``, if the rivals are compared with it.
        settings: Budgets and window, half of the paper's low one and of its high one.
    """

    texts: int = 48
    length: int = 1024
    prompt: int = 256
    steps: int = 10_000
    part: str = "all"
    settings: ConfKVSettings = _BUDGETS
    picture: Path | None = None
    kvpress: Path | None = None

    def plays(self, part: str) -> bool:
        """Whether this part is asked for."""
        return self.part in ("all", part)


PARTS: Final = ("all", "exact", "text", "hidden", "needles", "pages", "sweeps", "kvpress")
FULL: Final = Scale()
QUICK: Final = Scale(texts=6, length=384, prompt=128, steps=300)
_HIDDEN: Final = 64  # newest tokens that the ablation hides, of 1,024: the paper hides 256 of 4,096
_LONGEST, _FACTS, _QUESTIONS = 512, 32, 400  # as the recall model was taught
_SEEDS: Final = (1, 2, 3)
_SWEPT: Final = 16  # texts of a sweep
_COMPARED: Final = 9  # texts of which others say what they would keep


def run(
    progress: bool = True, scale: Scale = FULL, model: Path | None = None, text: Path | None = None
) -> Figures:
    """Measure on ``model``, or else on each model that ships.

    Raises:
        BenchError: There is no such model, or no text that is long enough.
    """
    console = Console(stderr=True, quiet=not progress)
    figures = Figures("confkv")
    with only_errors():
        if scale.plays("exact"):
            _add_exactness(figures)
        if model is None and scale.plays("needles"):
            _add_recall(figures, console.print)
        folders = [model] if model else shipped("text")
        if not folders:
            console.print("no model to read with: name one with --model")
        for number, folder in enumerate(folders):
            prefix = "" if number == 0 else f"{folder.name}_"
            _measure(figures, load(folder), scale, text, prefix, console.print)
    return figures


def _add_exactness(figures: Figures) -> None:
    figures.add(
        "noop_identical", all(map(_is_identical, map(random_model, FAMILIES))), "bool", "yes"
    )
    figures.add("attention_ratio", attention_ratios(), "× dense", "≤ 1.3")
    share = eviction_share_of_a_larger_model()
    figures.add("eviction_share_100m", share, "of a step, batch 8", "≤ 0.05")


def _add_recall(figures: Figures, say: Say) -> None:
    """What the model remembers, what a wrong place does to it, and what is left after eviction."""
    for folder in shipped("recall"):
        taught = load(folder).model
        marks = examine(taught, _LONGEST, _FACTS, _QUESTIONS)
        add_recalled(figures, taught, _LONGEST, _FACTS, say)
        low, high = wilson(marks.plain, marks.n)
        figures.add("recall_full", marks.plain / marks.n, f"of answers, {low:.3f} – {high:.3f}")
        figures.add("recall_repeated", marks.repeated / marks.n_repeated, "of answers")
        wrong = marks.misplaced / marks.n_repeated
        figures.add("recall_misplaced", wrong, "of answers, K at a wrong place", "far below")


def _is_identical(model: Any) -> bool:
    """Whether an answer below the budget has the bits of one with a plain cache."""
    prompt = torch.arange(1, 21)[None]
    answers = [
        model.generate(
            prompt, past_key_values=cache, max_new_tokens=60, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )
        for cache in (DynamicCache(config=model.config), ConfKVCache(model.config))
    ]  # fmt: skip
    plain, ours = (torch.stack(answer.logits) for answer in answers)
    return bool(torch.equal(plain, ours))


def _measure(
    figures: Figures, loaded: Loaded, scale: Scale, text: Path | None, prefix: str, say: Say
) -> None:
    texts, it = _texts(loaded, scale, text), scale.settings
    if scale.plays("text"):
        _add_perplexity(figures, loaded.model, texts, scale, prefix, say)
    if scale.plays("hidden"):
        _add_divergence(figures, loaded.model, texts, scale, prefix, say)
    if scale.plays("needles"):
        add_needles(figures, loaded, texts, it, prefix, say)
    if scale.plays("pages"):
        add_pages(figures, loaded, it, prefix, say)
    if scale.plays("sweeps"):
        few = texts[:_SWEPT]
        add_sweeps(figures, loaded.model, few, scale.prompt, it, prefix, say)
    if scale.plays("exact"):
        _add_int8(figures, loaded.model, texts, prefix)
    if scale.plays("kvpress") and scale.kvpress is not None:
        add_agreement(figures, loaded.model, texts[:_COMPARED], scale.kvpress, prefix)
    if scale.picture is not None:
        draw(loaded.model, texts[0, : scale.prompt], it, scale.picture)


def _add_int8(figures: Figures, model: Any, texts: Tensor, prefix: str) -> None:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(texts[:2], past_key_values=cache)
    errors = [int8_errors(layer.keys) for layer in cache.layers]
    worst, by_channel, by_token = (list(column) for column in zip(*errors, strict=True))
    figures.add(f"{prefix}int8_roundtrip", max(worst), "steps, the worst key", "≤ 0.5")
    figures.add(f"{prefix}int8_error_channel", by_channel, "of a key's size, a layer each")
    figures.add(f"{prefix}int8_error_token", by_token, "of a key's size, a layer each")


def _texts(loaded: Loaded, scale: Scale, text: Path | None) -> Tensor:
    found, each = documents(text), max(1, scale.texts // len(_SEEDS))
    parts = [windows(loaded.tokenizer, found, each, scale.length, seed) for seed in _SEEDS]
    return torch.cat(parts)


def _add_perplexity(
    figures: Figures, model: Any, texts: Tensor, scale: Scale, prefix: str, say: Say
) -> None:
    arms = Perplexity(model, texts, scale.prompt, scale.settings, say)
    arms.run()
    arms.isolate(seed=1)
    arms.add_to(figures, prefix)
    for name, arm in (("gap_closed_int8", "ours_int8"), ("gap_closed_l", "ours_l")):
        figures.add(f"{prefix}{name}", arms.closed(arm), "of window → full", "")
    best = max((arm.name for arm in STATIC if arm.name != "window"), key=arms.median)
    figures.add(f"{prefix}best_static_gap", arms.closed(best), f"of window → full: {best}")
    for name in ("int8", "int4"):
        cost = arms.median("ours") - arms.median(f"ours_same_{name}")
        figures.add(f"{prefix}{name}_cost", cost, "of window → full, the same tokens", "")
    in_order, apart = arms.order()
    figures.add(f"{prefix}isolation_order", in_order and apart, "bool", "yes")
    figures.add(f"{prefix}isolation_order_of_means", in_order, "bool")
    figures.add(f"{prefix}peak_ratio", arms.peak_ratio(), "× a window of the high budget", "≤ 1.3")
    share = eviction_share(
        model, texts[:8], scale.prompt, lambda: confident(model.config, scale.settings)
    )
    figures.add(f"{prefix}eviction_share", share, "of a step, batch 8", "≤ 0.05")


def _add_divergence(
    figures: Figures, model: Any, texts: Tensor, scale: Scale, prefix: str, say: Say
) -> None:
    done = ablate(model, texts, _HIDDEN, scale.steps, seed=1)
    r, chance = pearson(done.confidence, done.divergence)
    say(f"hidden tokens: r {r:.3f}, p {chance:.1e}")
    figures.add(f"{prefix}kl_pearson", r, "confidence and nats", "< 0")
    figures.add(f"{prefix}kl_chance", chance, "p", "< 0.001")
    falls = falls_over_bins(done.confidence, done.divergence)
    figures.add(f"{prefix}kl_bins_fall", falls, "bool", "yes")
    figures.add(f"{prefix}sure_steps", float(np.mean(done.confidence >= 0.7)), "of steps")
