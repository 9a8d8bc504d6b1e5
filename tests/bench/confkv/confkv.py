"""``kvgraph bench confkv``: what the cache keeps, what that costs, and beside whom."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from kvgraph.hooks.confkv.cache import ConfKVCache
from kvgraph.hooks.confkv.layer import ConfLayer
from kvgraph.hooks.confkv.settings import ConfKVSettings
from kvgraph.kernels.backends.attention import confidence_score
from kvgraph.kernels.backends.mixed import KvPart
from kvgraph.kernels.ops import mixed_attention
from kvgraph.kernels.quant import channel_scale, from_cells, to_cells
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ..figures import Figures, only_errors
from ..teaching.recall_language import examine
from .confkv_arms import STATIC, Floats, Followed, confident, follow, read_at_once
from .confkv_texts import documents, windows
from .kvpress_agreement import add_agreement
from .needles import add_needles, add_pages, add_recalled
from .perplexity import Perplexity
from .resampled import wilson
from .small_models import FAMILIES, Loaded, load, random_model, shipped

BATCH, HEADS, KV_HEADS, DIMS, TOKENS, RECENT = 8, 8, 4, 64, 512, 64
_ROUNDS: Final = 60
_LARGER: Final = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12,
}  # fmt: skip
_LARGER_ROUNDS: Final = 4  # evictions


def attention_ratios() -> list[float]:
    """Time of mixed tiled attention over that of dense sdpa, at the same length, in turns.

    Eight rows, eight query heads on four of keys, 512 tokens of which 64 are not in int8. The mixed
    one also says how much attention each token got.
    """
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(BATCH, HEADS, 1, DIMS, generator=generator)
    keys, values = (
        torch.randn(BATCH, KV_HEADS, TOKENS, DIMS, generator=generator) for _ in range(2)
    )
    parts = [_old(keys, values), KvPart(keys[:, :, -RECENT:], values[:, :, -RECENT:])]

    def dense() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, enable_gqa=True
        )

    def mixed() -> Tensor:
        return mixed_attention(query, parts, None, DIMS**-0.5).output

    for _ in range(5):
        dense()
        mixed()
    return [_seconds(mixed) / _seconds(dense) for _ in range(_ROUNDS)]


def _old(keys: Tensor, values: Tensor) -> KvPart:
    old = [plane[:, :, :-RECENT] for plane in (keys, values)]
    scales = [channel_scale(plane) for plane in old]
    cells = [to_cells(plane, scale) for plane, scale in zip(old, scales, strict=True)]
    return KvPart(cells[0], cells[1], scales[0], scales[1])


def eviction_share(
    model: Any, texts: Tensor, prompt: int, make: Callable[[], ConfKVCache]
) -> float:
    """Share of a step that goes into eviction and what is known of tokens, timed in place."""
    cache = make()
    spent, inside = [0.0], [False]
    for layer in [each for each in cache.layers if isinstance(each, ConfLayer)]:
        for name in ("note", "shrink", "arrived"):
            setattr(layer, name, _timed(getattr(layer, name), spent, inside))
    with torch.inference_mode():
        model(texts[:, :prompt], past_key_values=cache)
        spent[0], began = 0.0, time.perf_counter()
        for at in range(prompt, texts.shape[1]):
            model(texts[:, at : at + 1], past_key_values=cache)
        return spent[0] / (time.perf_counter() - began)


def eviction_share_of_a_larger_model() -> float:
    """The same of a Llama of a hundred million parameters with random weights, never sure.

    A small model's step is mostly Python. Texts begin at the high budget, so that tokens are
    evicted throughout.
    """
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**_LARGER)).eval()
    settings = ConfKVSettings()
    steps = _LARGER_ROUNDS * settings.slack
    texts = torch.randint(1, _LARGER["vocab_size"], (BATCH, settings.high + steps))
    return eviction_share(model, texts, settings.high, lambda: ConfKVCache(model.config, settings))


def int8_error(keys: Tensor) -> float:
    """The largest error of int8 on real keys [batch, heads, tokens, dims], in steps."""
    keys = keys.float()
    scale = channel_scale(keys)
    error = from_cells(to_cells(keys, scale), scale) - keys
    return float((error.abs() / scale[:, :, None]).max())


def _timed(
    action: Callable[..., Any], spent: list[float], inside: list[bool]
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if inside[0]:
            return action(*args)
        inside[0], began = True, time.perf_counter()
        try:
            return action(*args)
        finally:
            inside[0] = False
            spent[0] += time.perf_counter() - began

    return run


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Ablated(NamedTuple):
    """Of each judged step: how sure the model was, and the divergence in nats; both [steps]."""

    confidence: Floats
    divergence: Floats


def ablate(model: Any, texts: Tensor, hidden: int, steps: int, seed: int) -> Ablated:
    """Hide the last ``hidden`` tokens from one query at a time, at random places of the texts.
    Everything else keeps the keys and values that it has with nothing hidden.
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


_SURE: Final = 0.7  # a mistake is confident from here, whatever tau is
_AFTER: Final = 16  # tokens behind a confident mistake that it is judged by; chosen
_TAUS: Final = (0.5, 0.6, 0.7, 0.8, 0.9)
_ALPHAS: Final = (0.0, 0.5, 0.9, 1.0)
_GAMMAS: Final = (0.5, 0.9, 0.97, 0.99)


def points(it: ConfKVSettings) -> dict[str, ConfKVSettings]:
    """The settings of the sweep by name; each differs from ``it`` in one of them."""
    least = it.window + it.slack
    lows = sorted({max(least, it.low * share // 4) for share in (3, 4, 6, 8)})
    windows = (it.window // 2, it.window, it.low - it.slack)
    return {
        **{f"tau_{tau}": replace(it, tau=tau) for tau in _TAUS},
        **{f"low_{low}": replace(it, low=low) for low in lows},
        **{f"window_{window}": replace(it, window=window) for window in windows},
        **{f"alpha_{alpha}": replace(it, alpha=alpha) for alpha in _ALPHAS},
        **{f"gamma_{gamma}": replace(it, gamma=gamma) for gamma in _GAMMAS},
    }


def add_sweeps(
    figures: Figures, model: Any, texts: Tensor, prompt: int, it: ConfKVSettings, prefix: str,
    say: Say,
) -> None:  # fmt: skip
    """For each point: nats above a full cache, tokens held, and nats behind confident mistakes."""
    full, _ = read_at_once(model, texts, prompt)
    for name, settings in points(it).items():
        done = follow(model, texts, prompt, confident(model.config, settings))
        lost, room = (done.surprise - full).mean(1), float(done.room.mean())
        figures.add(f"{prefix}sweep_{name}", list(lost), "nats above full, texts")
        figures.add(f"{prefix}sweep_{name}_room", room, "tokens a layer")
        say(f"{name}: {lost.mean():+.4f} nats, {room:.0f} tokens a layer")
        if name.startswith("tau"):
            share, behind = mistakes(done, full)
            figures.add(f"{prefix}mistakes_{name}", behind, "nats above full behind mistakes")
            figures.add(f"{prefix}mistakes_share", share, "of steps: sure, and wrong")


def mistakes(done: Followed, full: Floats) -> tuple[float, float]:
    """The share of steps that were sure and wrong, and what is lost on the tokens behind them."""
    wrong = (done.confidence[:, : done.right.shape[1]] >= _SURE) & ~done.right
    behind = np.zeros_like(wrong)
    for offset in range(1, _AFTER + 1):
        behind[:, offset:] |= wrong[:, :-offset]
    lost = (done.surprise - full)[behind]
    return float(wrong.mean()), float(lost.mean()) if lost.size else 0.0


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


Say = Callable[[str], None]


_BUDGETS: Final = ConfKVSettings(low=64, high=256, window=32, slack=8)


@dataclass(frozen=True, slots=True)
class Scale:
    texts: int = 48  # held-out windows; three seeds choose their thirds
    length: int = 1024  # tokens of a window
    prompt: int = 256  # of which so many are read at once
    steps: int = 10_000  # of the ablation
    # ``all`` or one of ``PARTS``: ``hidden`` is the ablation, ``pages`` the agents
    part: str = "all"
    # budgets and window, half of the paper's low one and of its high one
    settings: ConfKVSettings = _BUDGETS
    picture: Path | None = None  # where the trace of one answer is drawn, if anywhere
    # python of an environment with ``kvpress``, if the rivals are compared with it
    kvpress: Path | None = None

    def plays(self, part: str) -> bool:
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
    worst = max(int8_error(layer.keys) for layer in cache.layers)
    figures.add(f"{prefix}int8_roundtrip", worst, "steps, the worst key", "≤ 0.5")


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
    figures.add(f"{prefix}peak_ratio", arms.peak_ratio(), "× a window of the high budget", "≤ 1.3")
    share = eviction_share(
        model, texts[:8], scale.prompt, lambda: confident(model.config, scale.settings)
    )
    figures.add(f"{prefix}eviction_share", share, "of a step, batch 8", "≤ 0.05")


def _add_divergence(
    figures: Figures, model: Any, texts: Tensor, scale: Scale, prefix: str, say: Say
) -> None:
    done = ablate(model, texts, _HIDDEN, scale.steps, seed=1)
    r = float(np.corrcoef(done.confidence, done.divergence)[0, 1])
    say(f"hidden tokens: r {r:.3f}")
    figures.add(f"{prefix}kl_pearson", r, "confidence and nats", "< 0")
