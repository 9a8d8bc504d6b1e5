"""Exports the graph for analysis, as networkx or GraphML; never on a ranking path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import networkx as nx
import numpy as np

from .explain import ROOT, block_attributes, edge_link
from .kvcache_graph import KVCacheGraph
from .tables.edges import BLOCK_TO_BLOCK, Edge
from .tables.tables import Tables
from .types import NO_ROW, EdgeType

_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, escaped or not (XML 1.0, production 2)."""


def to_networkx(graph: KVCacheGraph) -> nx.MultiDiGraph:
    """Export to a ``MultiDiGraph``: nodes by name with ``kind``, edges keyed by type, with
    ``weight``.

    Equal block ids of different models get a suffix: ``@`` and a digest of the model.
    """
    tables = graph.tables
    suffixes = _suffixes(tables)
    exported = nx.MultiDiGraph()
    for row in tables.blocks.live_rows().tolist():
        attributes = block_attributes(tables, row)
        exported.add_node(attributes.pop("id") + suffixes.get(row, ""), **attributes)
    for edge in tables.all_edges.all():
        link = edge_link(tables, edge)
        source, target = link["source"], link["target"] + suffixes.get(_block_at(edge), "")
        if source != ROOT:
            source += suffixes.get(edge.source, "")
        for node in (source, target):
            if node not in exported:
                exported.add_node(node, kind=node.partition(":")[0])
        exported.add_edge(
            source, target, key=link["type"], type=link["type"], weight=link["weight"]
        )
    return exported


def _suffixes(tables: Tables) -> dict[int, str]:
    """Row → suffix, for blocks whose id another model's block has too."""
    rows = tables.blocks.live_rows()
    _, same, count = np.unique(
        tables.blocks.wire_keys(rows), return_inverse=True, return_counts=True
    )
    twins = rows[count[same] > 1].tolist()
    return {row: f"@{int(tables.blocks.salt[row]):016x}" for row in twins}


def _block_at(edge: Edge) -> int:
    """The block row that an edge's target is or copies; ``NO_ROW`` for a memory."""
    if edge.kind is EdgeType.SPILL_LINK:
        return edge.target >> 1
    return edge.target if edge.kind in BLOCK_TO_BLOCK else NO_ROW


def write_graphml(exported: nx.MultiDiGraph, path: Path) -> None:
    """Write GraphML for Gephi, yEd and the like.

    Lists and nulls in ``exported`` become text, and characters that XML cannot hold are escaped as
    ``\\x00``.
    """
    for _, attributes in exported.nodes(data=True):
        for name, value in list(attributes.items()):
            attributes[name] = _scalar(value)
    nx.write_graphml(nx.relabel_nodes(exported, _in_xml), path)


def _scalar(value: Any) -> str | int | float | bool:
    if isinstance(value, int | float):
        return value
    return "" if value is None else _in_xml(str(value))


def _in_xml(text: str) -> str:
    return _NOT_XML.sub(lambda found: ascii(found[0])[1:-1], text)
