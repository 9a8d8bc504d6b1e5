"""``kvgraph export``: writes what a sidecar or a recording knows for other tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, Any, Final, get_args

import typer
from pydantic import BaseModel

from ...graph.errors import ConfigError, KvGraphError
from ..page.graph import GraphView
from .activity import Activity, Kind, Origin, origin_of


class Format(StrEnum):
    PERFETTO = "perfetto"
    GRAPHML = "graphml"
    JSON = "json"
    PARQUET = "parquet"


_ONLY_UNUSED: Final = (
    "Of a block that left, a sidecar remembers only since when it was unused; when it entered the "
    "pool is in raw logs alone (`kvgraph record --raw`)."
)
_ENDINGS: Final = {
    Format.PERFETTO: ".trace.json",
    Format.GRAPHML: ".graphml",
    Format.JSON: ".json",
    Format.PARQUET: "-parquet",
}


def export(
    format: Annotated[Format, typer.Argument(help="perfetto: sessions and engines over time, for "
        "ui.perfetto.dev; graphml, json: the graph; parquet: columns.")],
    source: Annotated[str | None, typer.Argument(help="A sidecar's URL, a snapshot, or what "
        "`kvgraph record --raw` wrote; without it, the sidecar that runs.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file to write (parquet: the "
        "directory), which must not exist; without it, kvgraph.trace.json and the like.")] = None,
    blocks: Annotated[int, typer.Option(min=0, help="perfetto: of how many blocks to tell when "
        "they came and left; the last ones.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Say what was written as JSON.")] = False,
) -> None:  # fmt: skip
    """Write what a sidecar or a recording knows, for other tools."""
    origin, path = origin_of(source), out or Path(f"kvgraph{_ENDINGS[format]}")
    if path.exists():
        raise ConfigError(f"{path} exists; name another file with --out")
    counts = _WRITERS[format](origin, path, blocks)
    if as_json:
        typer.echo(json.dumps({"format": format.value, "path": str(path), **counts}))
        return
    said = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    typer.echo(f"written: {path} ({said})")
    if format is Format.PERFETTO:
        typer.echo("open it at https://ui.perfetto.dev: the file stays in your browser")


def _perfetto(origin: Origin, path: Path, blocks: int) -> dict[str, int]:
    from .perfetto import perfetto

    activity = origin.activity()
    trace = perfetto(activity, blocks)
    with _new(path) as file:
        json.dump(trace, file)
    whole = not any(life.since_use for life in activity.lives)
    for each in (*activity.unknown, *(() if whole else (_ONLY_UNUSED,))):
        typer.echo(f"note: {each}", err=True)
    return {"events": len(trace["traceEvents"]), "requests": len(activity.requests)}


def _json(origin: Origin, path: Path, blocks: int) -> dict[str, int]:
    data = node_link(origin.graph())
    with _new(path) as file:
        json.dump(data, file)
    return _sizes(data)


def _graphml(origin: Origin, path: Path, blocks: int) -> dict[str, int]:
    try:
        import networkx

        from ...graph.export import write_graphml
    except ImportError as error:
        raise _missing(error) from None
    data = node_link(origin.graph())
    exported = networkx.node_link_graph(data, edges="edges")
    exported.graph.clear()
    with _writing(path):
        write_graphml(exported, path)
    return _sizes(data)


def _parquet(origin: Origin, path: Path, blocks: int) -> dict[str, int]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise _missing(error) from None
    assert pyarrow.parquet
    with _writing(path):
        return write_parquet(origin, path)


def _sizes(data: dict[str, Any]) -> dict[str, int]:
    return {"nodes": len(data["nodes"]), "edges": len(data["edges"])}


def _missing(error: ImportError) -> KvGraphError:
    return KvGraphError(f"this format cannot be written ({error}): pip install 'kvgraph[export]'")


@contextmanager
def _new(path: Path) -> Iterator[IO[str]]:
    with _writing(path), path.open("x", encoding="utf-8") as file:
        yield file


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


_WRITERS: Final[dict[Format, Callable[[Origin, Path, int], dict[str, int]]]] = {
    Format.PERFETTO: _perfetto,
    Format.GRAPHML: _graphml,
    Format.JSON: _json,
    Format.PARQUET: _parquet,
}


_TIERS: Final = ((1, "pool"), (2, "warm"), (4, "cold"), (8, "store"))
_SUPERSEDED, _SHARED = 1, 2  # flags of the API


def node_link(view: GraphView) -> dict[str, Any]:
    """The graph as node-link data, as networkx and d3 read it; nodes are blocks and memories.

    ``networkx.node_link_graph(…, edges="edges")`` reads it.
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


def write_parquet(origin: Origin, directory: Path) -> dict[str, int]:
    """Write requests, evictions, blocks and edges into a new directory; returns row counts."""
    import pyarrow
    import pyarrow.parquet

    # A snapshot has no requests, and a trace no graph.
    tables: dict[str, list[dict[str, Any]]] = {}
    if origin.kind is not Kind.SNAPSHOT:
        tables |= _logs(origin.activity())
    if origin.kind is not Kind.TRACE:
        view = origin.graph()
        places = [str(n) for n in range(len(view.nodes.key) + len(view.names.memories))]
        tables["blocks"] = [{"node": n, **row} for n, row in enumerate(block_rows(view))]
        tables["edges"] = list(edge_rows(view, places))
    directory.mkdir()
    for name, rows in tables.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / f"{name}.parquet")
    return {name: len(rows) for name, rows in tables.items()}


def _logs(activity: Activity) -> dict[str, list[dict[str, Any]]]:
    logs = {"requests": [_flat(each) for each in activity.requests]}
    if activity.evictions is not None:
        logs["evictions"] = [each.model_dump() for each in activity.evictions]
    return logs


def _flat(model: BaseModel) -> dict[str, Any]:
    """Flatten nested fields to names such as ``miss_reason``, also where there was no miss."""
    flat: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        kinds = field.annotation, *get_args(field.annotation)
        nested = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if nested is None:
            flat[name] = value
        else:
            inside = nested.model_fields
            flat |= {f"{name}_{inner}": getattr(value, inner, None) for inner in inside}
    return flat
