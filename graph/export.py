"""The graph for analysis: networkx and GraphML. Never on a ranking path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from .kvcache_graph import KVCacheGraph
from .queries import block_attributes, edge_link


def to_networkx(graph: KVCacheGraph) -> nx.MultiDiGraph:
    """A ``MultiDiGraph``: nodes by name with ``kind``, edges keyed by type, with ``weight``."""
    tables = graph.tables
    exported = nx.MultiDiGraph()
    for row in tables.blocks.live_rows().tolist():
        attributes = block_attributes(tables, row)
        exported.add_node(attributes.pop("id"), **attributes)
    edges = tables.edges
    for edge in np.flatnonzero(edges.alive[: edges.size]).tolist():
        link = edge_link(tables, edge)
        target = link["target"]
        if target not in exported:
            exported.add_node(target, kind=target.partition(":")[0])
        exported.add_edge(
            link["source"], target, key=link["type"], type=link["type"], weight=link["weight"]
        )
    return exported


def write_graphml(graph: KVCacheGraph, path: Path) -> None:
    """Write GraphML for Gephi, yEd and their like."""
    exported = to_networkx(graph)
    for _, attributes in exported.nodes(data=True):
        for name, value in list(attributes.items()):
            attributes[name] = _scalar(value)
    nx.write_graphml(exported, path)


def _scalar(value: Any) -> str | int | float | bool:
    """GraphML holds no lists, dicts or nulls."""
    if isinstance(value, str | int | float | bool):
        return value
    return "" if value is None else str(value)
