"""``kvgraph export``: writes the graph of a sidecar or a snapshot for other tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ...graph.errors import ConfigError, KvGraphError
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.snapshot import load
from ..page.graph import GraphView, graph_view
from .remote import ask_patiently, only_sidecar_url

MOST_NODES: Final = 200_000  # the API's limit
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, escaped or not (XML 1.0, production 2)."""


class Format(StrEnum):
    GRAPHML = "graphml"
    JSON = "json"


def export(
    format: Annotated[Format, typer.Argument(help="What to write.")],
    source: Annotated[str | None, typer.Argument(help="A sidecar's URL or a snapshot; without it, "
        "the sidecar that runs.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write, which must "
        "not exist; without it, kvgraph.graphml or kvgraph.json.")] = None,
) -> None:  # fmt: skip
    """Write the graph that a sidecar or a snapshot holds, for other tools."""
    path = out or Path(f"kvgraph.{format.value}")
    if path.exists():
        raise ConfigError(f"{path} exists; name another file with --out")
    data = node_link(_view(source))
    try:
        _WRITERS[format](data, path)
    except OSError as error:
        if not isinstance(error, FileExistsError):  # else it is somebody else's
            path.unlink(missing_ok=True)  # a part of it, beside which the next try would refuse
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    typer.echo(f"written: {path} ({len(data['nodes']):,} nodes, {len(data['edges']):,} edges)")


def _view(source: str | None) -> GraphView:
    if source is None or source.startswith(("http://", "https://")):
        url = only_sidecar_url(source)
        return GraphView.model_validate(ask_patiently(url, f"/v1/graph?limit={MOST_NODES}", 60.0))
    graph = KVCacheGraph()
    load(graph, Path(source))
    return graph_view(graph, MOST_NODES, None, float)


def _write_json(data: dict[str, Any], path: Path) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(data, file)


def write_graphml(data: dict[str, Any], path: Path) -> None:
    """Write GraphML for Gephi, yEd and the like: lists and nulls become text, and characters that
    XML cannot hold are escaped as ``\\x00``.
    """
    try:
        import networkx
    except ImportError as error:
        raise KvGraphError(
            f"this format cannot be written ({error}): pip install 'kvgraph[export]'"
        ) from None
    exported = networkx.node_link_graph(data, edges="edges")
    exported.graph.clear()
    for _, attributes in exported.nodes(data=True):
        attributes |= {name: _scalar(value) for name, value in attributes.items()}
    networkx.write_graphml(networkx.relabel_nodes(exported, _in_xml), path)


def _scalar(value: Any) -> str | int | float | bool:
    if isinstance(value, int | float):
        return value
    return "" if value is None else _in_xml(str(value))


def _in_xml(text: str) -> str:
    return _NOT_XML.sub(lambda found: ascii(found[0])[1:-1], text)


_WRITERS: Final = {Format.GRAPHML: write_graphml, Format.JSON: _write_json}

_TIERS: Final = ((1, "pool"), (2, "warm"), (4, "cold"), (8, "store"))
_SUPERSEDED, _SHARED = 1, 2  # flags of the API


def node_link(view: GraphView) -> dict[str, Any]:
    """Return the graph as node-link data, readable by networkx and d3; nodes are blocks and
    memories. For networkx use ``networkx.node_link_graph(…, edges="edges")``.
    """
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
    """Block keys; equal keys of different models get a suffix with ``@``."""
    times: dict[str, int] = {}
    names = []
    for key in keys:
        times[key] = times.get(key, 0) + 1
        names.append(key if times[key] == 1 else f"{key}@{times[key]}")
    return names
