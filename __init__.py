"""kvgraph: a graph that knows what an LLM engine's KV cache is holding.

What others build on is imported from here, and loaded when it is first asked for: an engine that
is not switched on loads none of it, and whoever ranks a graph needs no torch.

The names in ``__all__``, the commands and the configuration are the stable face: what leaves it is
deprecated for one minor release first. Every other module is private and may move at any time. What
may change besides (wire versions, the snapshot's format) is in docs/stability.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

# For type checkers, which read neither `_ROOMS` nor `__getattr__`; `as` says that a name is public.
if TYPE_CHECKING:
    from .advisor.cache_watch import CacheWatch as CacheWatch
    from .advisor.config.sections import ObserveConfig as ObserveConfig
    from .advisor.intents.client import IntentClient as IntentClient
    from .advisor.intents.client import hints as hints
    from .advisor.intents.langgraph import LangGraphCallbacks as LangGraphCallbacks
    from .advisor.precache.keeper import PrefixKeeper as PrefixKeeper
    from .advisor.replay.arms import hit_rate as hit_rate
    from .advisor.replay.reader import load_trace as load_trace
    from .advisor.replay.trace import Trace as Trace
    from .advisor.sockets.kv_events import KvEventSource as KvEventSource
    from .graph.errors import KvGraphError as KvGraphError
    from .graph.kvcache_graph import KVCacheGraph as KVCacheGraph
    from .graph.ranking.formulas import ClassicPolicy as ClassicPolicy
    from .graph.ranking.policy import Policy as Policy
    from .graph.ranking.policy import Rules as Rules
    from .graph.ranking.policy import ScoreProfile as ScoreProfile
    from .graph.ranking.policy import View as View
    from .graph.ranking.policy import Weights as Weights
    from .graph.tables.blocks import Selection as Selection
    from .graph.tables.tables import GraphLimits as GraphLimits
    from .graph.types import EdgeType as EdgeType
    from .graph.types import SourceLayer as SourceLayer
    from .graph.types import Tier as Tier
    from .graph.wire.advice import AdmissionAdvice as AdmissionAdvice
    from .graph.wire.advice import EvictionRanking as EvictionRanking
    from .graph.wire.events import BlocksCleared as BlocksCleared
    from .graph.wire.events import BlocksRemoved as BlocksRemoved
    from .graph.wire.events import BlocksStored as BlocksStored
    from .graph.wire.events import EngineHello as EngineHello
    from .graph.wire.events import RequestFinished as RequestFinished
    from .graph.wire.events import RequestStarted as RequestStarted
    from .graph.wire.events import Segment as Segment
    from .graph.wire.events import SessionSignal as SessionSignal
    from .hooks.confkv.cache import ConfKVCache as ConfKVCache
    from .hooks.confkv.settings import ConfKVSettings as ConfKVSettings
    from .hooks.fake import FakeEngine as FakeEngine
    from .hooks.link.client import AdvisorClient as AdvisorClient
    from .hooks.link.client import ClientOptions as ClientOptions
    from .hooks.link.client import EngineEnd as EngineEnd


__version__ = "0.1.0"

# Which module has which public names; what type checkers are told above is the same, by a test.
# `View` and `Selection` are among them because the methods of a `Policy` of one's own take them.
_ROOMS: Final = {
    "advisor.cache_watch": "CacheWatch",
    "advisor.config.sections": "ObserveConfig",
    "advisor.intents.client": "hints IntentClient",
    "advisor.intents.langgraph": "LangGraphCallbacks",
    "advisor.precache.keeper": "PrefixKeeper",
    "advisor.replay.arms": "hit_rate",
    "advisor.replay.reader": "load_trace",
    "advisor.replay.trace": "Trace",
    "advisor.sockets.kv_events": "KvEventSource",
    "graph.errors": "KvGraphError",
    "graph.kvcache_graph": "KVCacheGraph",
    "graph.ranking.formulas": "ClassicPolicy",
    "graph.ranking.policy": "Policy Rules ScoreProfile Weights View",
    "graph.tables.blocks": "Selection",
    "graph.tables.tables": "GraphLimits",
    "graph.types": "EdgeType SourceLayer Tier",
    "graph.wire.advice": "AdmissionAdvice EvictionRanking",
    "graph.wire.events": "BlocksCleared BlocksRemoved BlocksStored EngineHello"
    " RequestFinished RequestStarted Segment SessionSignal",
    "hooks.confkv.cache": "ConfKVCache",
    "hooks.confkv.settings": "ConfKVSettings",
    "hooks.fake": "FakeEngine",
    "hooks.link.client": "AdvisorClient ClientOptions EngineEnd",
}
_ROOM_OF: Final = {name: room for room, names in _ROOMS.items() for name in names.split()}
_EXTRAS: Final = {"ConfKVCache": "transformers"}  # what a plain `pip install kvgraph` lacks

__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    """Import what is public at its first use.

    Raises:
        AttributeError: Nothing public is called ``name``.
        ImportError: It needs an extra that is not installed; which one is said.
    """
    if name not in _ROOM_OF:
        raise AttributeError(f"kvgraph has no public name {name!r}; see kvgraph.__all__")
    try:
        value = getattr(import_module(f".{_ROOM_OF[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS:
            raise
        raise ImportError(
            f"kvgraph.{name}: {error}; run: pip install 'kvgraph[{_EXTRAS[name]}]'"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
