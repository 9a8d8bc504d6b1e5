"""``kvgraph export``: writes a file that other tools open."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from ...graph.errors import ConfigError, KvGraphError

if TYPE_CHECKING:
    from ..happened.origins import Origin


class Format(StrEnum):
    """What can be written."""

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
    from ..happened.origins import origin_of

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

    happened = origin.happened()
    trace = perfetto(happened, blocks)
    with _new(path) as file:
        json.dump(trace, file)
    whole = not any(life.since_use for life in happened.lives)
    for each in (*happened.unknown, *(() if whole else (_ONLY_UNUSED,))):
        typer.echo(f"note: {each}", err=True)
    return {"events": len(trace["traceEvents"]), "requests": len(happened.requests)}


def _json(origin: Origin, path: Path, blocks: int) -> dict[str, int]:
    from .node_link import node_link

    data = node_link(origin.graph())
    with _new(path) as file:
        json.dump(data, file)
    return _sizes(data)


def _graphml(origin: Origin, path: Path, blocks: int) -> dict[str, int]:
    from .node_link import node_link

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
        from .parquet import write_parquet
    except ImportError as error:
        raise _missing(error) from None
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
    """Say of a file that cannot be written why; raises ConfigError."""
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
