"""What a change of weights would do, and would have done, before it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ...dashboards.answers.what_if import Mover, WeightEffect, WindowEffect
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.queries.views import block_name
from ...graph.ranking.policy import Policy, Scores, Weighted
from ...graph.ranking.view import View
from ...graph.types import LAYER_NAMES, NO_ROW
from ..config.sections import ScoreConfig
from ..shadows.ceiling import Walked
from ..shadows.other_weights import OtherWeights
from ..shadows.window_play import WindowPlay
from ..times.unix_time import Unix
from .logged.eviction_views import chosen_engine

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
