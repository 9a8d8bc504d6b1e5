"""``/v1/graph`` and ``/v1/blocks/KEY``: the graph as columns, and one block with its history."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Header, Path, Query
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part, parse_key
from ...graph.explain import block_name, session_row
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.logs.history import LoggedTables
from ...graph.tables.blocks import Selection, known_depth
from ...graph.tables.edges import BLOCK_TO_BLOCK, STORED
from ...graph.tables.tables import Tables
from ...graph.types import EDGE_NAMES, LAYER_NAMES, NO_ROW, EdgeType, Rows, Tier
from ..words.times import Unix
from .evictions import eviction_view
from .misses import request_view
from .page import NameQuery, Page, answered, recent

MAX_NODES: Final = 200_000  # chosen: the page is promised to be usable at this size

KeyParam = Annotated[str, Path(max_length=24)]
NodesQuery = Annotated[int, Query(ge=1, le=MAX_NODES)]


class Nodes(Part):
    """Blocks in columns; ``parent`` and edges refer to blocks by their index.

    Attributes:
        parent: Index of the block before it in its chain; -1: none, or not shown.
        depth: Number of blocks before it in its chain.
        layer, session, tenant, segment: Indices in ``Names``; -1: none.
        importance: From 0 to 1, in hundredths.
        tiers: Bits of all engines together: 1 pool, 2 warm, 4 cold; 0: remembered only.
        engines: Bits of the engines whose pools hold it, by their indices in ``Names``.
        flags: Bits: 1 superseded, 2 shared by several sessions.
        hits: Number of requests that found it.
        idle_s: Whole seconds since it was last used.
    """

    key: list[str]
    parent: list[int]
    depth: list[int]
    layer: list[int]
    importance: list[int]
    tiers: list[int]
    engines: list[int]
    flags: list[int]
    hits: list[int]
    idle_s: list[int]
    session: list[int]
    tenant: list[int]
    segment: list[int]


class Links(Part):
    """Edges in columns. ``type`` is an index in ``Names.types``.

    A ``target`` not below the number of nodes is a memory: ``Names.memories[target - nodes]``.
    Copies are not nodes (see ``Nodes.tiers``), and neither is the root, so they have no edges here.
    """

    source: list[int]
    target: list[int]
    type: list[int]
    weight: list[float]


class Names(Part):
    """The meanings of the columns' numbers."""

    layers: list[str]
    types: list[str]
    sessions: list[str]
    tenants: list[str]
    segments: list[str]
    engines: list[str]
    memories: list[str]


class GraphView(Answer):
    """At most ``limit`` blocks, those used last, and at most three times as many edges.

    Attributes:
        version: Changes with the graph, as does the ``ETag``, so that repeated requests are cheap.
        blocks, edges: Numbers in the graph, which exceed those here if the view was cut.
        left_out: Edges between these blocks that were left out, the weakest of their types.
    """

    version: int
    blocks: int
    edges: int
    left_out: int
    nodes: Nodes
    links: Links
    names: Names


class Moment(Part):
    """An event in a block's history, in words.

    Attributes:
        what: ``turn``, ``pause``, ``eviction``, ``regret``, ``load``, ``prefetch`` or ``miss``.
        request, eviction: The record's id in its log, if there is one.
        blocks: Number of blocks concerned.
    """

    at: float
    what: str
    sentence: str
    engine: str | None
    request: int | None
    eviction: int | None
    blocks: int | None


def moment(
    at: float,
    what: str,
    sentence: str,
    engine: str | None,
    *,
    request: int | None = None,
    eviction: int | None = None,
    blocks: int | None = None,
) -> Moment:
    return Moment(
        at=at, what=what, sentence=sentence, engine=engine, request=request, eviction=eviction,
        blocks=blocks,
    )  # fmt: skip


class BlockView(Answer):
    """One block: ``explain`` is the content of ``/blocks/KEY/explain``; history, the newest
    first.
    """

    key: str
    explain: dict[str, Any]
    history: list[Moment]


def add_routes(paths: APIRouter, page: Page) -> None:
    """The view's routes; an unchanged graph is answered with 304."""

    @paths.get("/graph", response_model=GraphView)
    def graph(
        limit: NodesQuery = 20_000,
        session: NameQuery = None,
        if_none_match: Annotated[str | None, Header(max_length=64)] = None,
    ) -> Response:
        tag = f'"{page.graph.changes.total}"'
        if if_none_match == tag:
            return Response(status_code=304, headers={"ETag": tag})
        found = graph_of(page, limit, session)
        answer = answered(found)
        answer.headers["ETag"] = f'"{found.version}"'
        return answer

    @paths.get("/blocks/{key}", response_model=BlockView)
    def block(key: KeyParam) -> Response:
        return answered(block_of(page, parse_key(key)))


@recent
def graph_of(page: Page, limit: int, session: str | None = None) -> GraphView:
    with page.questions.turn():
        row = None if session is None else session_row(page.graph.tables, session, None)
        return graph_view(page.graph, limit, row, page.unix)


def block_of(page: Page, key: int) -> BlockView:
    with page.questions.turn():
        explained = page.graph.explain(key, page.latest())
        tables, unix = page.graph.tables, page.unix
        moments = [*_evictions(tables, key, unix), *_misses(tables, key, unix)]
    history = sorted(moments, key=lambda each: -each.at)
    return BlockView(at=page.unix.now(), key=explained["id"], explain=explained, history=history)


# The graph as columns: cheap to draw at twenty thousand nodes.

_LINKS_A_NODE: Final = 3  # edges shown per block, at most; chosen


def graph_view(graph: KVCacheGraph, limit: int, session: int | None, unix: Unix) -> GraphView:
    """Return at most ``limit`` blocks, those used last; only of one session's row, if given."""
    tables, now = graph.tables, graph.clock()
    rows = _picked(tables, limit, session)
    place = np.full(tables.blocks.size + 1, NO_ROW, dtype=np.int32)  # the last: NO_ROW
    place[rows] = np.arange(len(rows))
    sessions, session_of = _numbered(tables.blocks.session[rows])
    tenants, tenant_of = _numbered(tables.blocks.tenant[rows])
    segments, segment_of = _numbered(tables.blocks.identity[rows])
    links, memories, left_out = _links(tables, rows, place)
    names = Names(
        layers=list(LAYER_NAMES),
        types=list(EDGE_NAMES),
        sessions=[tables.sessions.names[row] for row in sessions],
        tenants=[tables.tenants.name(number) or "" for number in tenants],
        segments=[tables.segment_names.name(number) or "" for number in segments],
        engines=_engines(tables),
        memories=[tables.memories.name(number) or "" for number in memories],
    )
    return GraphView.model_construct(
        at=unix(now),
        version=graph.changes.total,
        blocks=len(tables.blocks),
        edges=int(tables.all_edges.counts().sum()),
        nodes=_nodes(
            tables, rows, place, now, session=session_of, tenant=tenant_of, segment=segment_of
        ),
        links=links,
        left_out=left_out,
        names=names,
    )


def _picked(tables: Tables, limit: int, session: int | None) -> Rows:
    blocks = tables.blocks
    rows = blocks.live_rows()
    if session is not None:
        rows = rows[blocks.session[rows] == session]
    if len(rows) > limit:
        used = Selection(blocks, rows).last_used()
        rows = np.sort(rows[np.argpartition(-used, limit)[:limit]])
    return rows


def _numbered(numbers: npt.NDArray[Any]) -> tuple[list[int], npt.NDArray[Any]]:
    """The distinct numbers without ``NO_ROW``, and the place of each number among them."""
    distinct, place = np.unique(numbers[numbers != NO_ROW], return_inverse=True)
    places = np.full(len(numbers), NO_ROW, dtype=np.int64)
    places[numbers != NO_ROW] = place
    return distinct.tolist(), places


def _nodes(
    tables: Tables, rows: Rows, place: Rows, now: float, **owners: npt.NDArray[Any]
) -> Nodes:
    blocks = tables.blocks
    tiers = blocks.tiers[:, rows]
    hot = (tiers & int(Tier.HOT)) != 0
    engines = (hot * (1 << np.arange(len(tiers), dtype=np.int64))[:, None]).sum(axis=0)
    used = Selection(blocks, rows).last_used()
    columns: dict[str, npt.NDArray[Any]] = {
        "parent": place[blocks.parent[rows]],
        "depth": known_depth(blocks.depth[rows]),
        "layer": blocks.layer[rows],
        "importance": np.rint(blocks.importance[rows] * 100).astype(np.int64),
        "tiers": np.bitwise_or.reduce(tiers, axis=0),
        "engines": engines,
        "flags": blocks.flags[rows],
        "hits": blocks.hit_count[rows],
        "idle_s": np.maximum(now - used, 0).astype(np.int64),
        **owners,
    }
    keys = [block_name(key) for key in blocks.wire_keys(rows).tolist()]
    lists = {name: column.tolist() for name, column in columns.items()}
    return Nodes.model_construct(key=keys, **lists)


def _links(tables: Tables, rows: Rows, place: Rows) -> tuple[Links, list[int], int]:
    """Edges between these blocks and to memories, the memories, and how many edges are left out."""
    blocks, most = tables.blocks, _LINKS_A_NODE * len(rows)
    parent = place[blocks.parent[rows]]
    child = np.flatnonzero(parent != NO_ROW)
    shared = child[blocks.walkers[rows[child]] > 1]
    parts = [
        _part(EdgeType.TEMPORAL, parent[child], child, np.ones(len(child))),
        _part(EdgeType.PREFIX_SHARE, parent[shared], shared, blocks.walkers[rows[shared]]),
    ]
    stored, memories = tables.edges.columns(), list[int]()
    learned: list[npt.NDArray[np.float64]] = []
    for kind in STORED:
        of = np.flatnonzero(stored["kind"] == int(kind))
        of = of[place[stored["source"][of]] != NO_ROW]
        if kind in BLOCK_TO_BLOCK:
            target = place[stored["target"][of]]
        else:
            memories, target = _numbered(stored["target"][of])
            target = target + len(rows)
        seen = target != NO_ROW
        source, weight = place[stored["source"][of]][seen], stored["weight"][of][seen]
        learned.append(_part(kind, source, target[seen], weight))
    everything = sum(part.shape[1] for part in (*parts, *learned))
    parts += _strongest(learned, most - sum(part.shape[1] for part in parts))
    columns = np.concatenate(parts, axis=1)
    source, target, types = columns[:3].astype(np.int64).tolist()
    weight = np.round(columns[3], 3).tolist()
    links = Links.model_construct(source=source, target=target, type=types, weight=weight)
    return links, memories, everything - columns.shape[1]


def _strongest(parts: list[npt.NDArray[np.float64]], room: int) -> list[npt.NDArray[np.float64]]:
    """The ``room`` heaviest edges, shared between the types; types with few edges keep them all."""
    kept = []
    for place, part in enumerate(sorted(parts, key=lambda part: part.shape[1])):
        share = room // (len(parts) - place)
        kept.append(part[:, np.argsort(-part[3], kind="stable")[:share]])
        room -= kept[-1].shape[1]
    return kept


def _part(kind: EdgeType, *columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """float64 ``[4, n]``: sources, targets, types and weights."""
    source, target, weight = columns
    return np.stack([source, target, np.full(len(source), int(kind)), weight]).astype(np.float64)


def _engines(tables: Tables) -> list[str]:
    names = [""] * (1 + max(tables.engines.values(), default=-1))
    for name, column in tables.engines.items():
        names[column] = name
    return names


def _evictions(tables: LoggedTables, key: int, unix: Unix) -> list[Moment]:
    found = []
    for engine, column in tables.engines.items():
        log = tables.history.evictions.get(column)
        if log is None:
            continue
        numbers, keys = log.keys_since(-inf)
        for number in numbers[keys == (np.uint64(key) ^ tables.salt(column))].tolist():
            view = eviction_view(tables, engine, log, number, unix)
            found.append(moment(view.at, "eviction", view.sentence, engine, eviction=number))
            if view.wanted_after_s is not None:
                wanted = (
                    f"A request wanted it again, {view.wanted_after_s:.1f} s after it had left."
                )
                at = view.at + view.wanted_after_s
                found.append(moment(at, "regret", wanted, engine, eviction=number))
    return found


def _misses(tables: LoggedTables, key: int, unix: Unix) -> list[Moment]:
    history = tables.history
    found = []
    for number in history.requests.missing(key):
        view = request_view(history, number, unix)
        assert view.miss is not None
        found.append(moment(view.at, "miss", view.miss.sentence, view.engine, request=number))
    return found
