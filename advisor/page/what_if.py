"""``/v1/weights``: the weights that decide the ranking, and the effect of changing them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import Field

from ...dashboards.answer import Answer, Part
from ...graph.errors import ConfigError
from ...graph.explain import block_name
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.policy import Policy, Scores, View, Weighted
from ...graph.ranking.policy import Weights as ScoreWeights
from ...graph.types import LAYER_NAMES, NO_ROW
from ..config.config import Config
from ..config.edits import NO_FILE, change_in_words
from ..config.sections import ScoreConfig
from ..policies.registry import POLICIES, new_policy
from ..shadows.ceiling import WindowPlay, WindowRequest
from ..shadows.pools import OtherWeights
from ..words.times import Unix
from ..words.words import WEIGHT_MEANINGS, heeded
from .page import NameQuery, Page, answered, chosen_engine
from .shadows import Shadows, shadows_of


class Weights(Answer):
    """The configured weights and rules that decide the ranking, by their keys in the configuration
    file.

    Attributes:
        policy, next_policy: The policy that ranks, and the one that will after the next start.
        policies: All available policies.
        heeds: Which weights the ranking policy uses, in words; None for a custom policy.
        score: [score]'s numbers by name.
        defaults: The numbers without any configuration.
        meanings: The meaning of each number, and of each type of edge, in words.
        file: The file that changes are written to; None without one.
        is_editable: Whether this sidecar writes changes; ``why_not`` gives the reason if not.
            Changes can be previewed and tried in any case.
        undoable: Number of changes that can be undone.
    """

    policy: str
    next_policy: str
    heeds: str | None
    policies: list[str]
    guard: bool
    score: dict[str, float]
    edge_types: dict[str, float]
    protected_layers: list[str]
    defaults: dict[str, float]
    edge_type_defaults: dict[str, float]
    meanings: dict[str, str]
    layers: list[str]
    file: str | None
    is_editable: bool
    why_not: str | None
    undoable: int


class WeightChange(Part):
    """Changes to the weights; everything not named stays as it is.

    Attributes:
        score: Numbers of [score] by name, as in ``Weights.score``.
        edge_types: Numbers of [score.edge_types] by name.
        protected_layers: The complete new set; None: unchanged.
        policy: One of ``Weights.policies``, used after the next start; None: unchanged.
    """

    score: dict[str, float] = Field(default_factory=dict)
    edge_types: dict[str, float] = Field(default_factory=dict)
    protected_layers: list[str] | None = None
    policy: Annotated[str, Field(max_length=64)] | None = None


class Mover(Part):
    """A block that a change moves: ``now`` and ``then`` are its places, None beyond the list."""

    key: str
    layer: str
    session: str | None
    now: int | None
    then: int | None


class WindowEffect(Part):
    """The remembered requests, replayed with every block's present score.

    Attributes:
        sentence: The same in words.
        requests, asked: Number of requests, and of their blocks.
        found_now, found_then: Blocks found with the present weights, and with the changed ones.
    """

    sentence: str
    requests: int
    asked: int
    found_now: int
    found_then: int


class WeightEffect(Answer):
    """The effect that a change would have on an engine's ranking.

    Attributes:
        sentence: The same in words.
        looked_at: Number of blocks in both lists of those evicted first.
        entering: Of these, the number in the list only after the change.
        movers: The blocks that move furthest.
        window: The effect on the remembered requests; None if there are none.
    """

    engine: str | None
    sentence: str
    looked_at: int
    entering: int
    movers: list[Mover]
    window: WindowEffect | None


def add_routes(paths: APIRouter, page: Page, edits: Callable[..., None]) -> None:
    """Add the view's routes; those that change or try something require the edit token."""

    @paths.get("/weights", response_model=Weights)
    def weights() -> Response:
        return answered(weights_of(page))

    @paths.post("/weights/preview", response_model=WeightEffect)
    def preview(change: WeightChange, engine: NameQuery = None) -> Response:
        return answered(effect_of(page, change, engine))

    @paths.post("/weights/trial", response_model=Shadows, dependencies=[Depends(edits)])
    def try_weights(change: WeightChange) -> Response:
        _try_in_shadow(page, change)
        return answered(shadows_of(page, None))

    @paths.delete("/weights/trial", response_model=Shadows, dependencies=[Depends(edits)])
    def end_trial() -> Response:
        page.shadows.weigh_alike()
        return answered(shadows_of(page, None))

    @paths.put("/weights", response_model=Weights, dependencies=[Depends(edits)])
    def change_weights(change: WeightChange) -> Response:
        # The file is watched: weights take effect within a second, a policy at the next start.
        written = page.watch.editor.apply(_by_section(change), "edit")
        return answered(weights_of(page, written))

    @paths.post("/weights/undo", response_model=Weights, dependencies=[Depends(edits)])
    def undo_weights() -> Response:
        return answered(weights_of(page, page.watch.editor.undo("edit")))


# What decides the ranking, as configured.

_SHARES: Final = (
    "protected_share", "protected_price_points", "tenant_share", "inferred_share", "reserved",
)  # fmt: skip


def _numbers_of(score: ScoreConfig, names: Iterable[str]) -> dict[str, float]:
    found = {name: getattr(score, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def weights_of(page: Page, written: Config | None = None) -> Weights:
    """Return what decides the ranking, as just ``written`` to the file, or as it was last read."""
    watch, policy = page.watch, page.graph.policy
    config, default = written or watch.config, ScoreConfig()
    score = config.score
    numbers = [each.name for each in fields(ScoreWeights)]
    numbers += ["session_memory_s", *_SHARES]
    return Weights(
        at=page.unix.now(),
        policy=policy.name,
        next_policy=config.policy.name,
        heeds=heeded(policy.name),
        policies=list(POLICIES),
        guard=config.policy.guard,
        score=_numbers_of(score, numbers),
        edge_types=score.edge_types.model_dump(),
        protected_layers=sorted(score.protected_layers),
        defaults=_numbers_of(default, numbers),
        edge_type_defaults=default.edge_types.model_dump(),
        meanings=dict(WEIGHT_MEANINGS),
        layers=list(LAYER_NAMES),
        file=watch.file,
        is_editable=watch.file is not None,
        why_not=(None if watch.file is not None else NO_FILE),
        undoable=watch.editor.undoable,
    )


FIRST: Final = 1_000  # most blocks of each list to compare; chosen
_PART: Final = 8  # the next eighth of a large pool is compared; chosen
_LEAST: Final = 10  # fewest blocks to compare; chosen
_MOVERS: Final = 50  # most blocks to list


def weight_effect(
    graph: KVCacheGraph,
    score: ScoreConfig,
    engine: str | None,
    unix: Unix,
    remembered: Callable[[str], tuple[list[WindowRequest], int]] = lambda _: ([], 0),
    policy: Policy | None = None,
) -> tuple[WeightEffect, Callable[[], WindowEffect | None]]:
    """Compare the live ranking with that of other weights, rules or another policy.

    Returns the effect on the ranking, and a function that computes the effect on the requests
    returned by ``remembered``, which takes longer and needs no lock.
    """
    now, name = graph.clock(), chosen_engine(graph.tables, engine)
    if name is None:
        said = "No engine is connected: there is nothing to rank."
        nothing = WeightEffect(
            at=unix(now), engine=None, sentence=said, looked_at=0, entering=0, movers=[],
            window=None,
        )  # fmt: skip
        return nothing, lambda: None
    column = graph.tables.engines[name]
    view, play = View(graph.tables, graph.rules, column, now), WindowPlay(*remembered(name))
    before, after = OtherWeights.in_force(graph), other_weights(graph, score, policy)
    old, scored = _next_to_go(view, before), play.scores(view, before)
    new, otherwise = _next_to_go(view, after), play.scores(view, after)
    entering = len(set(new) - set(old))
    said = _sentence(len(old), entering, after.policy, policy is not None)
    effect = WeightEffect(
        at=unix(now), engine=name, sentence=said, looked_at=len(old), entering=entering,
        movers=_movers(graph, old, new), window=None,
    )  # fmt: skip
    return effect, lambda: _window_effect(play, scored, otherwise)


def _window_effect(play: WindowPlay, before: Scores, after: Scores) -> WindowEffect | None:
    if not play.requests:
        return None
    now, then = play.found(before), play.found(after)
    return WindowEffect(
        sentence=_window_sentence(play, now, then),
        requests=play.requests, asked=play.asked, found_now=now, found_then=then,
    )  # fmt: skip


def _window_sentence(play: WindowPlay, now: int, then: int) -> str:
    head = (
        f"The last {play.requests:,} requests, played again from an empty pool with the scores of "
        "now (so compare these shares with each other only), would find "
    )
    if now == then:
        return f"{head}as many blocks: {now / play.asked:.1%} of {play.asked:,}."
    way = "more" if then > now else "fewer"
    return (
        f"{head}{abs(then - now):,} blocks {way}: {then / play.asked:.1%} of {play.asked:,}, where "
        f"the present weights find {now / play.asked:.1%}."
    )


def other_weights(
    graph: KVCacheGraph, score: ScoreConfig, policy: Policy | None = None
) -> OtherWeights:
    """Return a [score] section's weights and rules, for the live policy or for another one."""
    rules = score.rules(graph.rules.horizon_s)
    return OtherWeights(policy or graph.policy, score.weights(), rules)


def _next_to_go(view: View, weights: OtherWeights) -> list[int]:
    rows, scores = weights.resident_scores(view)
    first = min(FIRST, max(_LEAST, len(rows) // _PART))
    found: list[int] = rows[np.argsort(-scores, kind="stable")[:first]].tolist()
    return found


def _movers(graph: KVCacheGraph, old: list[int], new: list[int]) -> list[Mover]:
    """The blocks that move furthest; one that is in only one list moves from or to its end."""
    was, becomes = ({row: place for place, row in enumerate(rows)} for rows in (old, new))
    end = max(len(old), len(new))
    moved = {row: abs(was.get(row, end) - becomes.get(row, end)) for row in {*old, *new}}
    furthest = sorted((row for row in moved if moved[row]), key=lambda row: -moved[row])
    blocks, sessions = graph.tables.blocks, graph.tables.sessions
    return [
        Mover(
            key=block_name(int(blocks.wire_keys(row))),
            layer=LAYER_NAMES[blocks.layer[row]],
            session=None if blocks.session[row] == NO_ROW else sessions.names[blocks.session[row]],
            now=was.get(row),
            then=becomes.get(row),
        )
        for row in furthest[:_MOVERS]
    ]


def _sentence(count: int, entering: int, policy: Policy, is_another: bool) -> str:
    if not count:
        return "The engine's pool holds nothing yet."
    if is_another:
        return (
            f"Of the {count:,} blocks to go first {entering:,} would be others under the policy "
            f"{policy.name}, as it is before it has learned anything. It ranks from the sidecar's "
            "next start on."
        )
    if not isinstance(policy, Weighted):
        return f"The policy {policy.name} heeds no weights; only the rules change."
    return f"Of the {count:,} blocks to go first {entering:,} would be others."


_NO_NUMBERS: Final = {"edge_types", "protected_layers"}  # of [score]

logger = logging.getLogger(__name__)


def effect_of(page: Page, change: WeightChange, engine: str | None) -> WeightEffect:
    """Return the effect of a change; raises ConfigError if the change is not allowed."""
    score, other = _score_after(page, change)
    with page.questions.turn():
        effect, played = weight_effect(
            page.graph, score, engine, page.unix, page.shadows.remembered, other
        )
    return effect.model_copy(update={"window": played()})


def _try_in_shadow(page: Page, change: WeightChange) -> None:
    score, other = _score_after(page, change)
    weights = other_weights(page.graph, score, other)
    said = change_in_words(_by_section(change))
    page.shadows.weigh_otherwise(replace(weights, said=f"the weights that are tried: {said}"))
    logger.info("tried over the page, in a shadow: %s", said)


def _score_after(page: Page, change: WeightChange) -> tuple[ScoreConfig, Policy | None]:
    """[score] after a change, and the policy that it names if that is another one."""
    score = page.watch.editor.tried(_by_section(change)).score
    if change.policy in (None, page.graph.policy.name):
        return score, None
    return score, new_policy(change.policy, score.weights())


def _by_section(change: WeightChange) -> dict[str, dict[str, Any]]:
    """A change by sections of the file; ConfigError for what is no number of [score]."""
    for name in _NO_NUMBERS & change.score.keys():
        raise ConfigError(f"score.{name} is no number: name it beside score")
    score: dict[str, Any] = dict(change.score)
    if change.protected_layers is not None:
        score["protected_layers"] = list(dict.fromkeys(change.protected_layers))  # each once
    policy = {} if change.policy is None else {"name": change.policy}
    named = {"score": score, "score.edge_types": dict(change.edge_types), "policy": policy}
    return {section: values for section, values in named.items() if values}
