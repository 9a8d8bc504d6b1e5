"""``/v1/sampled``: attention and confidence, from sampled decode steps."""

from __future__ import annotations

from typing import Final

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part
from ...graph.explain import block_name, session_row
from ...graph.tables.tables import Tables
from ...graph.types import LAYER_NAMES, NO_ROW, STATE_NAMES, EdgeType, Rows, Tier
from .page import NameQuery, Page, RecordsQuery, answered, recent


class LayerAttention(Part):
    """Attention to the blocks of one source layer.

    Attributes:
        blocks: Sampled blocks of the layer.
        attention: Their share of all sampled attention, from 0 to 1.
    """

    layer: str
    blocks: int
    attention: float


class AttendedBlock(Part):
    """One block with its sampled attention.

    Attributes:
        session: The session that used it last; None if unknown.
        identity: The segment that it belongs to, if a request named it.
        attention: Running mean of its share of the attention in the samples that included it.
        importance: From 0 to 1; much attention raises it if no request stated it.
        in_pool: Whether an engine's pool holds it.
    """

    key: str
    layer: str
    session: str | None
    identity: str | None
    attention: float
    importance: float
    in_pool: bool


class SessionConfidence(Part):
    """The model's confidence in its answers to one session.

    Attributes:
        confidence: Running mean, from 0 to 1; not a probability of being right.
    """

    session: str
    tenant: str | None
    state: str
    confidence: float


class Sampled(Answer):
    """Sampled attention and confidence; empty if no engine samples.

    Attributes:
        layers: The sampled layers, the most precious first.
        blocks: The most attended blocks first.
        sessions: The least confident first.
        confidence: The mean over all sampled sessions; None without any.
        edges: Number of edges made from samples, by type.
    """

    layers: list[LayerAttention]
    blocks: list[AttendedBlock]
    sessions: list[SessionConfidence]
    confidence: float | None
    edges: dict[str, int]


_SAMPLED_EDGES: Final = (EdgeType.CO_ATTEND, EdgeType.SEMANTIC)  # edges that come of samples alone


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/sampled", response_model=Sampled)
    def sampled(limit: RecordsQuery = 50, session: NameQuery = None) -> Response:
        return answered(sampled_of(page, limit, session))


@recent
def sampled_of(page: Page, limit: int, session: str | None = None) -> Sampled:
    """Return up to ``limit`` blocks and as many sessions; only those of ``session`` if given."""
    tables = page.graph.tables
    blocks, sessions = tables.blocks, tables.sessions
    with page.questions.turn():
        row = None if session is None else session_row(tables, session, None)
        live = blocks.live_rows()
        looked_at = live[blocks.attention[live] > 0]
        confidence = sessions.confidence[: sessions.size]
        asked = np.flatnonzero(confidence >= 0)
        if row is not None:
            looked_at = looked_at[blocks.session[looked_at] == row]
            asked = asked[asked == row]
        counts = tables.all_edges.counts()
        most = np.argsort(-blocks.attention[looked_at], kind="stable")
        least_sure = asked[np.argsort(confidence[asked], kind="stable")]
        return Sampled(
            at=page.unix(page.graph.clock()),
            layers=_layers(tables, looked_at),
            blocks=[_block(tables, row) for row in looked_at[most[:limit]].tolist()],
            sessions=[_session(tables, row) for row in least_sure[:limit].tolist()],
            confidence=round(float(confidence[asked].mean()), 4) if len(asked) else None,
            edges={kind.name.lower(): int(counts[kind]) for kind in _SAMPLED_EDGES},
        )


def _layers(tables: Tables, rows: Rows) -> list[LayerAttention]:
    layer, attention = tables.blocks.layer[rows], tables.blocks.attention[rows]
    blocks = np.bincount(layer, minlength=len(LAYER_NAMES)).tolist()
    looks = np.bincount(layer, weights=attention, minlength=len(LAYER_NAMES))
    shares = (looks / max(looks.sum(), np.finfo(float).tiny)).tolist()
    return [
        LayerAttention(layer=name, blocks=blocks[at], attention=round(shares[at], 4))
        for at, name in enumerate(LAYER_NAMES)
        if blocks[at]
    ]


def _block(tables: Tables, row: int) -> AttendedBlock:
    blocks = tables.blocks
    session = int(blocks.session[row])
    return AttendedBlock(
        key=block_name(int(blocks.wire_keys(row))),
        layer=LAYER_NAMES[blocks.layer[row]],
        session=None if session == NO_ROW else tables.sessions.names[session],
        identity=tables.segment_names.name(int(blocks.identity[row])),
        attention=round(float(blocks.attention[row]), 6),
        importance=round(float(blocks.importance[row]), 4),
        in_pool=bool((blocks.tiers[:, row] & int(Tier.HOT)).any()),
    )


def _session(tables: Tables, row: int) -> SessionConfidence:
    sessions = tables.sessions
    return SessionConfidence(
        session=sessions.names[row],
        tenant=tables.tenants.name(int(sessions.tenant[row])),
        state=STATE_NAMES[sessions.state[row]],
        confidence=round(float(sessions.confidence[row]), 4),
    )
