"""kvgraph: a graph that knows what an LLM engine's KV cache is holding.

What others build on is imported from here, and loaded when it is first asked for: an engine that
is not switched on loads none of it, and whoever ranks a graph needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .advisor.caches.cache_watch import CacheWatch
    from .advisor.config.sections import ObserveConfig
    from .advisor.intents.client_hints import hints
    from .advisor.intents.intent_client import IntentClient
    from .advisor.intents.langgraph_callbacks import LangGraphCallbacks
    from .advisor.precache.prefix_keeper import PrefixKeeper
    from .advisor.replay.lab.hit_rate import hit_rate
    from .advisor.replay.traces.reader import load_trace
    from .advisor.replay.traces.trace import Trace
    from .advisor.sockets.kv_event_source import KvEventSource
    from .graph.errors import KvGraphError
    from .graph.kvcache_graph import KVCacheGraph
    from .graph.messages.advice import AdmissionAdvice, EvictionRanking
    from .graph.messages.events import (
        BlocksCleared,
        BlocksRemoved,
        BlocksStored,
        EngineHello,
        RequestFinished,
        RequestStarted,
        Segment,
        SessionSignal,
    )
    from .graph.ranking.formulas import ClassicPolicy
    from .graph.ranking.policy import Policy
    from .graph.ranking.profile import Rules, ScoreProfile, Weights
    from .graph.ranking.view import View
    from .graph.tables.blocks import Selection
    from .graph.tables.tables import GraphLimits, Tables
    from .graph.types import EdgeType, SourceLayer, Tier
    from .hooks.client import AdvisorClient, ClientOptions, EngineEnd
    from .hooks.fake import FakeEngine
    from .hooks.transformers.conf_cache import ConfKVCache
    from .hooks.transformers.conf_settings import ConfKVSettings

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
    "advisor.caches.cache_watch": "CacheWatch",
    "advisor.config.sections": "ObserveConfig",
    "advisor.intents.client_hints": "hints",
    "advisor.intents.intent_client": "IntentClient",
    "advisor.intents.langgraph_callbacks": "LangGraphCallbacks",
    "advisor.precache.prefix_keeper": "PrefixKeeper",
    "advisor.replay.lab.hit_rate": "hit_rate",
    "advisor.replay.traces.reader": "load_trace",
    "advisor.replay.traces.trace": "Trace",
    "advisor.sockets.kv_event_source": "KvEventSource",
    "graph.errors": "KvGraphError",
    "graph.kvcache_graph": "KVCacheGraph",
    "graph.messages.advice": "AdmissionAdvice EvictionRanking",
    "graph.messages.events": "BlocksCleared BlocksRemoved BlocksStored EngineHello RequestFinished"
    " RequestStarted Segment SessionSignal",
    "graph.ranking.formulas": "ClassicPolicy",
    "graph.ranking.policy": "Policy",
    "graph.ranking.profile": "Rules ScoreProfile Weights",
    "graph.ranking.view": "View",
    "graph.tables.blocks": "Selection",
    "graph.tables.tables": "GraphLimits Tables",
    "graph.types": "EdgeType SourceLayer Tier",
    "hooks.client": "AdvisorClient ClientOptions EngineEnd",
    "hooks.fake": "FakeEngine",
    "hooks.transformers.conf_cache": "ConfKVCache",
    "hooks.transformers.conf_settings": "ConfKVSettings",
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
