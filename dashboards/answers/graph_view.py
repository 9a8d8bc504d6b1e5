"""``/v1/graph`` and ``/v1/blocks/KEY``: the graph as columns, and one block with its history."""

from __future__ import annotations

from typing import Any

from .answer import Answer, Part


class Nodes(Part):
    """Blocks, a column each and a place a block; places are what edges and ``parent`` name.

    Attributes:
        parent: The block before it in its chain; -1: none, or it is not shown.
        depth: Blocks before it in its chain.
        layer, session, tenant, segment: Places in ``Names``; -1: none.
        importance: 0 to 1, in hundredths.
        tiers: Bits of all engines together: 1 pool, 2 warm, 4 cold; 0: remembered only.
        engines: Bits of the engines whose pool holds it, by their places in ``Names``.
        flags: Bits: 1 superseded, 2 shared by several sessions.
        hits: Requests that found it.
        idle_s: Seconds since it was last used, whole.
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
    """Edges, a column each. ``type`` is a place in ``Names.types``.

    A ``target`` from the number of nodes on is a memory: ``Names.memories[target - nodes]``.
    Copies are no nodes (see ``Nodes.tiers``), nor is the root, so neither has edges here.
    """

    source: list[int]
    target: list[int]
    type: list[int]
    weight: list[float]


class Names(Part):
    """What the columns' numbers mean."""

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
        version: Changes when the graph did; the ``ETag`` too, so that asking again is cheap.
        blocks, edges: How many the graph has; more than are here where it was cut.
        left_out: Edges between the blocks here that are not here, the weakest of their types.
    """

    version: int
    blocks: int
    edges: int
    left_out: int
    nodes: Nodes
    links: Links
    names: Names


class Moment(Part):
    """Something that happened, in words.

    Attributes:
        what: ``turn``, ``pause``, ``eviction``, ``regret``, ``load``, ``prefetch`` or ``miss``.
        request, eviction: The record in its log, where there is one.
        blocks: How many it is about.
    """

    at: float
    what: str
    sentence: str
    engine: str | None
    request: int | None
    eviction: int | None
    blocks: int | None


class BlockView(Answer):
    """One block: ``explain`` is what ``/blocks/KEY/explain`` says; history, the newest first."""

    key: str
    explain: dict[str, Any]
    history: list[Moment]
