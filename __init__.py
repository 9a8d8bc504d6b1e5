"""kvgraph: a graph that knows what an LLM engine's KV cache is holding.

What others build on is imported from here, and loaded when it is first asked for: an engine that
is not switched on loads none of it, and whoever ranks a graph needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .advisor.cache_watch import CacheWatch
    from .advisor.config.sections import ObserveConfig
    from .advisor.intents.client import IntentClient, hints
    from .advisor.intents.langgraph import LangGraphCallbacks
    from .advisor.precache.keeper import PrefixKeeper
    from .advisor.replay.arms import hit_rate
    from .advisor.replay.reader import load_trace
    from .advisor.replay.trace import Trace
    from .advisor.sockets.kv_events import KvEventSource
    from .graph.errors import KvGraphError
    from .graph.kvcache_graph import KVCacheGraph
    from .graph.ranking.formulas import ClassicPolicy
    from .graph.ranking.policy import Policy, Rules, ScoreProfile, View, Weights
    from .graph.tables.blocks import Selection
    from .graph.tables.tables import GraphLimits, Tables
    from .graph.types import EdgeType, SourceLayer, Tier
    from .graph.wire.advice import AdmissionAdvice, EvictionRanking
    from .graph.wire.events import (
        BlocksCleared,
        BlocksRemoved,
        BlocksStored,
        EngineHello,
        RequestFinished,
        RequestStarted,
        Segment,
        SessionSignal,
    )
    from .hooks.confkv.cache import ConfKVCache
    from .hooks.confkv.settings import ConfKVSettings
    from .hooks.fake import FakeEngine
    from .hooks.link.client import AdvisorClient, ClientOptions, EngineEnd

__version__ = "0.1.0"

__all__ = [
    "AdmissionAdvice",
    "AdvisorClient",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CacheWatch",
    "ClassicPolicy",
    "ClientOptions",
    "ConfKVCache",
    "ConfKVSettings",
    "EdgeType",
    "EngineEnd",
    "EngineHello",
    "EvictionRanking",
    "FakeEngine",
    "GraphLimits",
    "IntentClient",
    "KVCacheGraph",
    "KvEventSource",
    "KvGraphError",
    "LangGraphCallbacks",
    "ObserveConfig",
    "Policy",
    "PrefixKeeper",
    "RequestFinished",
    "RequestStarted",
    "Rules",
    "ScoreProfile",
    "Segment",
    "Selection",
    "SessionSignal",
    "SourceLayer",
    "Tables",
    "Tier",
    "Trace",
    "View",
    "Weights",
    "hints",
    "hit_rate",
    "load_trace",
]

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
    "graph.tables.tables": "GraphLimits Tables",
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


def __getattr__(name: str) -> Any:
    """Import what is public at its first use.

    Raises:
        AttributeError: Nothing public is called ``name``.
    """
    if name not in _ROOM_OF:
        raise AttributeError(f"kvgraph has no public name {name!r}; see kvgraph.__all__")
    value = getattr(import_module(f".{_ROOM_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
