"""``/v1/shadows`` and ``/v1/weights``: what else could rank, and what it would find."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from ...dashboards.answer import Answer, Part
from ...graph.errors import ConfigError
from ...graph.explain import block_name
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.formulas import LruPolicy
from ...graph.ranking.order import is_under_lru
from ...graph.ranking.policy import Policy, Scores, Terms, View, Weighted, terms_of
from ...graph.ranking.policy import Weights as ScoreWeights
from ...graph.ranking.rules import beyond_share, standings
from ...graph.tables.blocks import Selection
from ...graph.types import LAYER_NAMES, NO_ROW, Rows
from ...graph.wire.advice import EvictionRanking
from ..config.config import Config
from ..config.edits import NO_FILE, ConfigWatch, change_in_words
from ..config.sections import ScoreConfig
from ..policies.registry import POLICIES, new_policy
from ..shadows.ceiling import Walked, WindowPlay
from ..shadows.pools import OtherWeights
from ..shadows.runner import ShadowRunner
from ..words.times import Unix, UnixTime
from ..words.words import BEYOND_SHARE, beside_lru_lately, heeded, meanings, weight_meanings
from .evictions import RankedBlock, RankingView, chosen_engine
from .questions import Questions


class ShadowView(Part):
    """What a pool would have found under another policy or size, from the same requests.

    Attributes:
        name: What it is called; ``ours`` is the live pool, ``belady`` the ceiling.
        sentence: The same in words.
        policy: Who ranks there.
        capacity: Its size beside the live pool's: 1.0, 0.75, 1.25 or 2.0, or with tiers.
        tiers: Whether copies in colder tiers count: as so many blocks more. ``ours`` has what the
            engine has.
        blocks: Its size, of the whole pool.
        asked, found: Blocks of the sampled requests: of those that the ceiling is of, while that is
            known, and else of all.
        hit_rate: What they say all these requests would find; None before any. The ceiling's is
            never below that of a pool with no more room.
        ours: What the live engine found of the same requests, in its pool or loaded from its tiers.
        history: Hit rates by step, the oldest first; None where nothing was asked.
    """

    name: str
    sentence: str
    policy: str
    capacity: float
    tiers: bool
    blocks: int
    asked: int
    found: int
    hit_rate: float | None
    ours: float | None
    history: list[float | None]


class Shadows(Answer):
    """Shadows of one engine, ``ours`` first.

    Attributes:
        guard: Who ranks the engine's blocks and by how much, as its guard's own shadow says; None
            without an engine.
        sampled_share: Of sessions, that shadows follow, chosen by a hash of their names.
        sessions: How many these were so far.
        ranked_every_s: How often policies' shadows rank; seldom where that takes too long.
    """

    engine: str | None
    engines: list[str]
    guard: str | None
    sampled_share: float
    sessions: int
    ranked_every_s: float
    step_s: float
    starts: list[float]
    shadows: list[ShadowView]


class Weights(Answer):
    """What decides the ranking, as configured; keys are those of the configuration file.

    Attributes:
        policy, next_policy: The one that ranks, and the one that does from the next start on.
        policies: All that there are.
        heeds: Which weights the policy that ranks heeds, in words; None where nobody knows.
        score: [score]'s numbers by name.
        defaults: The same, as they are without configuration.
        meanings: What each number is, and each type of edge, in words.
        file: Where changes are kept; None: nowhere.
        is_editable: Whether this sidecar writes changes; ``why_not`` says why it does not. They can
            be previewed and tried in any case.
        undoable: How many changes can be taken back.
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
    """What to change of the weights; what is not named stays.

    Attributes:
        score: Of [score], by name: the numbers that ``Weights.score`` has.
        edge_types: Of [score.edge_types].
        protected_layers: All of them; None: as they are.
        policy: One of ``Weights.policies``, from the next start on; None: as it is.
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
    """The remembered requests, played again with every block's score as it is now.

    Attributes:
        sentence: The same in words.
        requests, asked: Requests, and their blocks.
        found_now, found_then: Blocks found with the present weights, and with the others.
    """

    sentence: str
    requests: int
    asked: int
    found_now: int
    found_then: int


class WeightEffect(Answer):
    """What a change would do to an engine's ranking, before it is made.

    Attributes:
        sentence: The same in words.
        looked_at: Blocks in both lists: those to go first.
        entering: Of these: only after the change.
        movers: The blocks that move furthest.
        window: On the remembered requests; None where none are.
    """

    engine: str | None
    sentence: str
    looked_at: int
    entering: int
    movers: list[Mover]
    window: WindowEffect | None


# Who goes next, with every term; and the weights that decide it.

_PROTECTED: Final = "protected_layer"
_SHARES: Final = (
    "protected_share", "protected_price_points", "tenant_share", "inferred_share", "reserved",
)  # fmt: skip
MOST: Final = 200  # blocks per answer; chosen


def ranking_view(
    graph: KVCacheGraph,
    latest: Mapping[str, EvictionRanking],
    engine: str | None,
    limit: int,
    unix: Unix,
) -> RankingView:
    """The ranking that an engine has now, the next to go first."""
    tables, now = graph.tables, graph.clock()
    name = chosen_engine(tables, engine)
    ranking = latest.get(name) if name is not None else None
    if name is None or ranking is None:
        return _empty(graph, name, unix(now))
    view = View(tables, graph.rules, tables.engines[name], now)
    by_policy = bool(len(ranking.order))
    policy: Policy = graph.policy if by_policy else LruPolicy()
    rows, ranked = _by_policy(view, ranking) if by_policy else _longest_unused(view, ranking)
    rows = rows[: min(limit, MOST)]
    known = rows[rows != NO_ROW]
    terms = terms_of(policy, view, Selection(view.blocks, known)) if len(known) else {}
    order = _ranked(view, rows, terms)
    rules = dict.fromkeys(name for each in order for name in each.standing)
    return RankingView(
        at=unix(now),
        engine=name,
        engines=list(tables.engines),
        ranked_by=policy.name,
        sentence=_who_ranks(graph, name, by_policy),
        epoch=ranking.epoch,
        age_s=round(now - ranking.ts, 3),
        terms=list(terms),
        meanings=meanings([*terms, *rules]),
        order=order,
        ranked=ranked,
        protected=len(ranking.protected),
    )


def _by_policy(view: View, ranking: EvictionRanking) -> tuple[Rows, int]:
    """The rows of a ranking, and how many it has."""
    salt = view.tables.salt(view.engine)
    return view.blocks.find(ranking.order[:MOST], salt), len(ranking.order)


def _longest_unused(view: View, ranking: EvictionRanking) -> tuple[Rows, int]:
    """The rows in the engine's own order, less what it keeps back all the same, and how many it
    has."""
    blocks, salt = view.blocks, view.tables.salt(view.engine)
    resident = blocks.holding(view.engine).rows
    kept = blocks.find(ranking.protected, salt)
    free = Selection(blocks, np.setdiff1d(resident, kept))
    oldest_first = np.argsort(-LruPolicy().scores(view, free), kind="stable")
    return free.rows[oldest_first[:MOST]], len(free)


def _ranked(view: View, rows: Rows, terms: Terms) -> list[RankedBlock]:
    """Those of these rows that are known, each with its place among them.

    Args:
        terms: Of those that are known.
    """
    places = np.flatnonzero(rows != NO_ROW)
    known = Selection(view.blocks, rows[places])
    each = [column.tolist() for column in terms.values()]
    parts = list(zip(*each, strict=True)) or [()] * len(known)
    beyond = set(beyond_share(view).tolist())
    rules = [
        [BEYOND_SHARE if name == _PROTECTED and row in beyond else name for name in each]
        for row, each in zip(known.rows.tolist(), standings(view, known), strict=True)
    ]
    found = zip(places.tolist(), known.rows.tolist(), parts, rules, strict=True)
    return [_block(view, *block) for block in found]


def _block(
    view: View, place: int, row: int, parts: tuple[float, ...], rules: list[str]
) -> RankedBlock:
    tables, blocks = view.tables, view.blocks
    session, identity = int(blocks.session[row]), int(blocks.identity[row])
    return RankedBlock(
        place=place,
        key=block_name(int(blocks.wire_keys(row))),
        layer=LAYER_NAMES[blocks.layer[row]],
        session=None if session == NO_ROW else tables.sessions.names[session],
        tenant=tables.tenants.name(int(blocks.tenant[row])),
        identity=tables.segment_names.name(identity),
        score=round(sum(parts), 3),
        terms=[round(value, 3) for value in parts],
        standing=rules,
    )


def ranked_by(graph: KVCacheGraph, engine: str) -> str:
    """The name of the policy that ranks an engine's blocks; ``lru`` where it keeps its own
    order."""
    column = graph.tables.engines.get(engine, NO_ROW)
    under_lru = is_under_lru(column, graph.policy, graph.referee)
    return LruPolicy.name if under_lru else graph.policy.name


def who_ranks(graph: KVCacheGraph, engine: str) -> str:
    """Who ranks an engine's blocks, and what its guard knows of policy and LRU, in words."""
    return _who_ranks(graph, engine, ranked_by(graph, engine) != LruPolicy.name)


def _who_ranks(graph: KVCacheGraph, engine: str, by_policy: bool) -> str:
    ruling = graph.ruling(engine)
    if by_policy:
        ahead = "" if ruling is None else f"; it is {beside_lru_lately(ruling.ahead)}"
        return f"The policy {graph.policy.name} ranks{ahead}."
    if ruling is None or ruling.policy_rules:
        return "The engine evicts the longest unused block first."
    return (
        f"LRU ranks: the policy {graph.policy.name} has not shown yet that it finds more; it is "
        f"{beside_lru_lately(ruling.ahead)}. What is protected goes last all the same."
    )


def _empty(graph: KVCacheGraph, engine: str | None, at: float) -> RankingView:
    return RankingView(
        at=at,
        engine=engine,
        engines=list(graph.tables.engines),
        ranked_by="lru",
        sentence="Nothing was ranked yet: engines evict the longest unused block first.",
        epoch=None,
        age_s=None,
        terms=[],
        meanings={},
        order=[],
        ranked=0,
        protected=0,
    )


def _said(score: ScoreConfig, names: Iterable[str]) -> dict[str, float]:
    """These numbers of a configuration; a share that nobody said is none."""
    found = {name: getattr(score, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def weights_view(watch: ConfigWatch, written: Config | None, policy: Policy, at: float) -> Weights:
    """What decides the ranking, as configured.

    Args:
        written: What the file was just made to say; None: what it said when it was last read.
        policy: The one that ranks.
    """
    config, default = written or watch.config, ScoreConfig()
    score = config.score
    numbers = [each.name for each in fields(ScoreWeights)]
    numbers += ["session_memory_s", *_SHARES]
    return Weights(
        at=at,
        policy=policy.name,
        next_policy=config.policy.name,
        heeds=heeded(policy.name),
        policies=list(POLICIES),
        guard=config.policy.guard,
        score=_said(score, numbers),
        edge_types=score.edge_types.model_dump(),
        protected_layers=sorted(score.protected_layers),
        defaults=_said(default, numbers),
        edge_type_defaults=default.edge_types.model_dump(),
        meanings=weight_meanings(),
        layers=list(LAYER_NAMES),
        file=watch.file,
        is_editable=watch.file is not None,
        why_not=(None if watch.file is not None else NO_FILE),
        undoable=watch.editor.undoable,
    )


# What a change of weights would do, and would have done, before it is made.

FIRST: Final = 1_000  # blocks of each list that are compared, at most; chosen
_PART: Final = 8  # of a large pool, one in so many blocks are compared: who goes next; chosen
_LEAST: Final = 10  # blocks that are compared in any case; chosen
_MOVERS: Final = 50  # that are told


def _nothing(engine: str) -> tuple[list[Walked], int]:
    return [], 0


def weight_effect(
    graph: KVCacheGraph,
    score: ScoreConfig,
    engine: str | None,
    unix: Unix,
    remembered: Callable[[str], tuple[list[Walked], int]] = _nothing,
    policy: Policy | None = None,
) -> tuple[WeightEffect, Callable[[], WindowEffect | None]]:
    """The live policy's order now, and with other weights and rules, or another policy's; nothing
    is changed.

    Args:
        remembered: Gives an engine's last requests, and the pool to play them in.
        policy: Another one, with other weights; None: the live one.

    Returns:
        The effect on the ranking; and what works out the effect on the remembered requests, which
        takes longer and needs no lock.
    """
    now, name = graph.clock(), chosen_engine(graph.tables, engine)
    if name is None:
        said = "No engine is connected: there is nothing to rank."
        return _effect(None, said, 0, 0, [], unix(now)), lambda: None
    column = graph.tables.engines[name]
    view, play = View(graph.tables, graph.rules, column, now), WindowPlay(*remembered(name))
    before, after = OtherWeights.in_force(graph), other_weights(graph, score, policy)
    old, scored = _first(view, before), play.scores(view, before)
    new, otherwise = _first(view, after), play.scores(view, after)
    entering = len(set(new) - set(old))
    said = _sentence(len(old), entering, after.policy, policy is not None)
    effect = _effect(name, said, len(old), entering, _movers(graph, old, new), unix(now))
    return effect, lambda: _played(play, scored, otherwise)


def _played(play: WindowPlay, before: Scores, after: Scores) -> WindowEffect | None:
    """The remembered requests under both scores."""
    if not play.requests:
        return None
    now, then = play.found(before), play.found(after)
    return WindowEffect(
        sentence=_told(play, now, then),
        requests=play.requests, asked=play.asked, found_now=now, found_then=then,
    )  # fmt: skip


def _told(play: WindowPlay, now: int, then: int) -> str:
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
    """A [score] section's weights and rules, for the live policy or for another one."""
    rules = score.rules(graph.rules.horizon_s)
    return OtherWeights(policy or graph.policy, score.weights(), rules)


def _first(view: View, weights: OtherWeights) -> list[int]:
    rows, scores = weights.resident_scores(view)
    first = min(FIRST, max(_LEAST, len(rows) // _PART))
    found: list[int] = rows[np.argsort(-scores, kind="stable")[:first]].tolist()
    return found


def _movers(graph: KVCacheGraph, old: list[int], new: list[int]) -> list[Mover]:
    """The blocks that move furthest; who is in one list alone moves from or to its end."""
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


def _effect(
    engine: str | None, sentence: str, looked_at: int, entering: int, movers: list[Mover], at: float
) -> WeightEffect:
    return WeightEffect(
        at=at, engine=engine, sentence=sentence, looked_at=looked_at, entering=entering,
        movers=movers, window=None,
    )  # fmt: skip


# ``WeightDesk``: weights shown, tried, changed and taken back.

_NO_NUMBERS: Final = {"edge_types", "protected_layers"}  # of [score]

logger = logging.getLogger(__name__)


class WeightDesk:
    """What the page does with weights.

    Args:
        graph: Read under its lock, one question at a time.
        questions: Gives each question its turn.
        shadows: Get what is tried.
        watch: The configuration in force, and its file.
        unix: Turns times of the graph's clock into Unix seconds.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        questions: Questions,
        shadows: ShadowRunner,
        watch: ConfigWatch,
        unix: UnixTime,
    ) -> None:
        self._graph = graph
        self._questions = questions
        self._shadows = shadows
        self._watch = watch
        self._unix = unix

    def weights(self, written: Config | None = None) -> Weights:
        """What decides the ranking; ``written`` is what the file was just made to say."""
        return weights_view(self._watch, written, self._graph.policy, self._unix.now())

    def preview(self, change: WeightChange, engine: str | None) -> WeightEffect:
        """What a change would do."""
        score, other = self._tried(change)
        with self._questions.turn():
            effect, played = weight_effect(
                self._graph, score, engine, self._unix, self._shadows.remembered, other
            )
        return effect.model_copy(update={"window": played()})

    def try_weights(self, change: WeightChange) -> None:
        """Let a shadow have a change from now on; nothing else changes."""
        score, other = self._tried(change)
        weights = other_weights(self._graph, score, other)
        said = change_in_words(_by_section(change))
        self._shadows.weigh_otherwise(replace(weights, said=f"the weights that are tried: {said}"))
        logger.info("tried over the page, in a shadow: %s", said)

    def end_trial(self) -> None:
        """Follow no other weights any more."""
        self._shadows.weigh_alike()

    def _tried(self, change: WeightChange) -> tuple[ScoreConfig, Policy | None]:
        """What a change would make of [score]; and the policy that it names, if it is another."""
        score = self._watch.editor.tried(_by_section(change)).score
        if change.policy in (None, self._graph.policy.name):
            return score, None
        return score, new_policy(change.policy, score.weights())

    def change_weights(self, change: WeightChange) -> Weights:
        """Write a change to the configuration file, from which it takes effect within a second,
        a policy at the next start."""
        return self.weights(self._watch.editor.apply(_by_section(change), "edit"))

    def undo_weights(self) -> Weights:
        """Take the last change back."""
        return self.weights(self._watch.editor.undo("edit"))


def _by_section(change: WeightChange) -> dict[str, dict[str, Any]]:
    """A change as the file's sections have it; ConfigError where [score] names no number."""
    for name in _NO_NUMBERS & change.score.keys():
        raise ConfigError(f"score.{name} is no number: name it beside score")
    score: dict[str, Any] = dict(change.score)
    if change.protected_layers is not None:
        score["protected_layers"] = list(dict.fromkeys(change.protected_layers))  # each once
    policy = {} if change.policy is None else {"name": change.policy}
    named = {"score": score, "score.edge_types": dict(change.edge_types), "policy": policy}
    return {section: values for section, values in named.items() if values}
