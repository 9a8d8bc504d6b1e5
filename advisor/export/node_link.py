"""The graph as node-link data, the shape that networkx and d3 read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ...dashboards.answers.graph_view import GraphView

_TIERS: Final = ((1, "pool"), (2, "warm"), (4, "cold"), (8, "store"))
_SUPERSEDED, _SHARED = 1, 2  # flags of the API


def node_link(view: GraphView) -> dict[str, Any]:
    """``networkx.node_link_graph(…, edges="edges")`` reads it; a node is a block or a memory."""
    names = _block_names(view.nodes.key)
    memories = [f"memory:{name}" for name in view.names.memories]
    return {
        "directed": True,
        "multigraph": True,
        "graph": {"at": view.at, "blocks": view.blocks, "edges": view.edges},
        "nodes": [
            *({"id": name, **block} for name, block in zip(names, block_rows(view), strict=True)),
            *({"id": name, "kind": "memory"} for name in memories),
        ],
        "edges": [{**edge, "key": edge["type"]} for edge in edge_rows(view, [*names, *memories])],
    }


def block_rows(view: GraphView) -> Iterator[dict[str, Any]]:
    """Each block's properties, in words where the API has numbers."""
    nodes, names = view.nodes, view.names
    engines = list(enumerate(names.engines))
    for n, key in enumerate(nodes.key):
        yield {
            "kind": "block",
            "key": key,
            "layer": names.layers[nodes.layer[n]],
            "depth": nodes.depth[n],
            "importance": nodes.importance[n] / 100,
            "tiers": [name for bit, name in _TIERS if nodes.tiers[n] & bit],
            "engines": [name for bit, name in engines if nodes.engines[n] >> bit & 1],
            "superseded": bool(nodes.flags[n] & _SUPERSEDED),
            "shared": bool(nodes.flags[n] & _SHARED),
            "hits": nodes.hits[n],
            "idle_s": nodes.idle_s[n],
            "session": _named(names.sessions, nodes.session[n]),
            "tenant": _named(names.tenants, nodes.tenant[n]),
        }


def edge_rows(view: GraphView, nodes: list[str]) -> Iterator[dict[str, Any]]:
    """Each edge, by its ends' names."""
    links, types = view.links, view.names.types
    columns = zip(links.source, links.target, links.type, links.weight, strict=True)
    for source, target, kind, weight in columns:
        yield {
            "source": nodes[source],
            "target": nodes[target],
            "type": types[kind],
            "weight": weight,
        }


def _named(names: list[str], place: int) -> str | None:
    return names[place] if place >= 0 else None


def _block_names(keys: list[str]) -> list[str]:
    """Keys; blocks of several models whose engines call them alike are told apart by ``@``."""
    times: dict[str, int] = {}
    names = []
    for key in keys:
        times[key] = times.get(key, 0) + 1
        names.append(key if times[key] == 1 else f"{key}@{times[key]}")
    return names
