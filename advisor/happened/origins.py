"""``Origin``: where a command shall read from, as a person named it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from ...dashboards.answers.graph_view import GraphView
from ...graph.errors import ConfigError
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.snapshot import load
from ..page.graph_columns import graph_view
from ..remote import only_sidecar_url
from ..replay.traces.lines import read_lines
from .from_raw_log import PlayedLog
from .from_sidecar import MOST_NODES, graph_at, happened_at
from .from_trace import happened_in_trace
from .happened import Happened

MOST_EVICTIONS: Final = 200_000  # that are read at most; chosen
_SNAPSHOT: Final = b"KVGSNAP"


class Kind(Enum):
    """What an origin is."""

    SIDECAR = "a running sidecar"
    RAW_LOG = "a raw log"
    TRACE = "a trace"
    SNAPSHOT = "a snapshot"


@dataclass(frozen=True, slots=True)
class Origin:
    """A sidecar's URL or a file."""

    kind: Kind
    name: str

    def happened(self, most_evictions: int = MOST_EVICTIONS) -> Happened:
        """What happened there.

        Raises:
            KvGraphError: It cannot be read, or does not say.
        """
        match self.kind:
            case Kind.SIDECAR:
                return happened_at(self.name, most_evictions)
            case Kind.RAW_LOG:
                return PlayedLog(Path(self.name), most_evictions).happened()
            case Kind.TRACE:
                return happened_in_trace(Path(self.name))
            case Kind.SNAPSHOT:
                raise ConfigError(
                    f"{self.name} is a snapshot: it holds a graph, and not what happened; allowed: "
                    "a running sidecar, or what `kvgraph record --raw` wrote"
                )

    def graph(self) -> GraphView:
        """The graph as it is there: now, at a log's end, or when the snapshot was written.

        Raises:
            KvGraphError: It cannot be read, or holds no graph.
        """
        match self.kind:
            case Kind.SIDECAR:
                return graph_at(self.name)
            case Kind.RAW_LOG:
                return _view(PlayedLog(Path(self.name), 1).graph)
            case Kind.SNAPSHOT:
                graph = KVCacheGraph()
                load(graph, Path(self.name))
                return _view(graph)
            case Kind.TRACE:
                raise ConfigError(
                    f"{self.name} is a trace: it holds requests, and no graph; allowed: a running "
                    "sidecar, a snapshot, or what `kvgraph record --raw` wrote"
                )


def origin_of(name: str | None) -> Origin:
    """What a person named: a file, a URL, or the one sidecar that runs.

    Raises:
        RemoteError: None was named, and none or several run.
        TraceError: The file cannot be read.
        ConfigError: The file is empty.
    """
    if name is not None and not name.startswith(("http://", "https://")):
        return Origin(_kind_of(Path(name)), name)
    return Origin(Kind.SIDECAR, only_sidecar_url(name))


def _kind_of(path: Path) -> Kind:
    for _, line in read_lines(path):
        if line.startswith(_SNAPSHOT):
            return Kind.SNAPSHOT
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        return Kind.RAW_LOG if isinstance(fields, dict) and "event" in fields else Kind.TRACE
    raise ConfigError(f"{path} is empty")


def _view(graph: KVCacheGraph) -> GraphView:
    return graph_view(graph, MOST_NODES, None, float)
