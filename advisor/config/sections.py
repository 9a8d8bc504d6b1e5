"""The sections of the configuration: their keys, defaults and allowed values."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ...graph.ranking.formulas import LruPolicy
from ...graph.ranking.policy import Policy, Rules, ScoreProfile, Weights
from ...graph.tables.tables import GraphLimits
from ...graph.types import LAYER_BY_NAME, LAYER_NAMES, MAX_ENGINES, EdgeType
from ...graph.wire.endpoints import check_endpoint
from ...graph.wire.events import MAX_KEYS
from ..policies.guard import Guard
from ..policies.registry import DEFAULT, POLICIES, new_policy

_PROFILE: Final = ScoreProfile()
_LIMITS: Final = GraphLimits()

Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
EdgeWeight = Annotated[float, Field(ge=-1e3, le=1e3, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Points = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Interval = Annotated[float, Field(ge=0.01, le=3600, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=1 << 24)]
# An engine ignores a ranking older than 2 s: two intervals must fit in, or all are ignored.
RankInterval = Annotated[float, Field(ge=0.01, le=1.0, allow_inf_nan=False)]
# An engine sends a heartbeat every 0.4 s, at most a tick of 0.2 s late; two of them may be late.
EngineTimeout = Annotated[float, Field(ge=1.0, le=60.0, allow_inf_nan=False)]
MaxStale = Annotated[float, Field(ge=0.1, le=60.0, allow_inf_nan=False)]
Listed = Annotated[int, Field(ge=1, le=MAX_KEYS)]
# Where OTLP/HTTP is spoken: a base address, or one with the path.
HttpUrl = Annotated[str, Field(max_length=2048, pattern=r"^https?://[^\s/]+(/\S*)?$")]
Token = Annotated[str, Field(min_length=16, max_length=128, pattern=r"^[A-Za-z0-9._~+/=-]+$")]


def _layer(name: str) -> str:
    if name not in LAYER_BY_NAME:
        raise ValueError(f"is not a source layer; allowed: {', '.join(LAYER_NAMES)}")
    return name


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"is not a policy; allowed: {', '.join(POLICIES)}")
    return name


def _key_folder(named: Path) -> Path:
    if not named.parts:
        raise ValueError("is empty; allowed: a folder that `kvgraph keys sidecar` made")
    return _expanded(named)


def _expanded(named: Path) -> Path:
    try:
        return named.expanduser()
    except RuntimeError:
        raise ValueError(
            "is in no user's home; allowed: ~ and ~NAME for users of this machine"
        ) from None


def _snapshot_file(named: Path) -> Path:
    if not named.name:  # as "" and "/"
        raise ValueError("names no file; allowed: the path of a file")
    return _expanded(named)


KeyFolder = Annotated[Path, AfterValidator(_key_folder)]
SnapshotFile = Annotated[Path, AfterValidator(_snapshot_file)]
PolicyName = Annotated[str, AfterValidator(_policy)]
LayerName = Annotated[str, AfterValidator(_layer)]
ConnectEndpoint = Annotated[
    str, AfterValidator(partial(check_endpoint, any_host=True, connects=True))
]


class Section(BaseModel):
    """Base of every section: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what would be taken for a number, and what no file or socket can be called."""
        if isinstance(value, bool) and _is_number(
            cls.model_fields[info.field_name or ""].annotation
        ):
            raise ValueError("is no number; allowed: a number")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("has a NUL character; allowed: text without one")
        return value


def _is_number(annotation: object) -> bool:
    return annotation in (int, float) or any(map(_is_number, get_args(annotation)))


class ObserveConfig(Section):
    """A vLLM engine without our hook, followed through its own KV events.

    Several engines may publish behind one endpoint, each with a ``topic`` of its own.

    These events are unencrypted and contain token ids: beyond loopback they are read only with
    ``allow_remote``. They do not name the engine's ``model``; without it, the engine shares no
    blocks with others.
    """

    endpoint: ConnectEndpoint
    replay_endpoint: ConnectEndpoint | None = None
    topic: Annotated[str, Field(max_length=256)] = ""
    model: Annotated[str, Field(max_length=256)] = ""
    allow_remote: bool = False

    @property
    def engine(self) -> str:
        """Return the engine's id in the graph, unless another one publishes at the same
        endpoint.
        """
        return f"kv:{self.endpoint}"

    @model_validator(mode="after")
    def _stays_here(self) -> Self:
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            try:
                check_endpoint(endpoint, any_host=self.allow_remote)
            except ValueError:
                raise ValueError(
                    f"{endpoint!r} goes beyond loopback, in clear; allowed: a loopback address, "
                    "or set allow_remote = true if you mean it"
                ) from None
        return self


class SidecarConfig(Section):
    """The process: where it listens, how often it ranks, what it keeps on disk.

    Attributes:
        keys: Folder of CURVE keys (`kvgraph keys`): a tcp endpoint then authenticates engines by
            key, and may be beyond loopback.
        endpoint: Where engines connect; empty picks a socket in the runtime directory.
        interval_s: Seconds between rankings; one is made sooner if an engine evicts fast.
        max_stale_s: If a ranking is older than this, ``/healthz`` reports a stall; engines ignore
            it anyway.
        engine_timeout_s: Seconds of silence after which an engine is forgotten.
        max_ranked: The most blocks in one ranking.
        token: Required at a tcp endpoint, and for HTTP answers about sessions and blocks. None: a
            new one is created and stored in the runtime directory, where this user's engines and
            commands find it.
        snapshot_path: Where the graph is kept across restarts; None: nowhere.
        snapshot_interval_s: Seconds between snapshots.
        observe: Engines without our hook, followed through their own KV events: a table each, with
            the keys of ``kvgraph.ObserveConfig``.
    """

    keys: KeyFolder | None = None
    endpoint: str = ""
    interval_s: RankInterval = 0.5
    max_stale_s: MaxStale = 2.0
    engine_timeout_s: EngineTimeout = 1.8
    max_ranked: Listed = 8192
    token: Token | None = None
    snapshot_path: SnapshotFile | None = None
    snapshot_interval_s: Interval = 60.0
    observe: Annotated[tuple[ObserveConfig, ...], Field(max_length=MAX_ENGINES - 1)] = ()

    @field_validator("endpoint")
    @classmethod
    def _stays_here(cls, endpoint: str, known: ValidationInfo) -> str:
        has_keys = known.data.get("keys") is not None  # validated before it
        return check_endpoint(endpoint, any_host=has_keys) if endpoint else endpoint

    @field_validator("observe")
    @classmethod
    def _tells_apart(cls, observe: tuple[ObserveConfig, ...]) -> tuple[ObserveConfig, ...]:
        topics: dict[str, set[str]] = {}
        for each in observe:
            known = topics.setdefault(each.endpoint, set())
            if known and (each.topic in known or "" in {each.topic, *known}):
                raise ValueError(
                    f"{each.endpoint!r} is followed twice; allowed: engines behind one endpoint, "
                    "each with a topic of its own"
                )
            known.add(each.topic)
        return observe

    def observed(self) -> dict[str, ObserveConfig]:
        """Return the engines to follow by their ids in the graph."""
        at = Counter(each.endpoint for each in self.observe)
        return {
            each.engine if at[each.endpoint] == 1 else f"{each.engine} {each.topic}": each
            for each in self.observe
        }


class HttpConfig(Section):
    """The HTTP surface. It listens beyond loopback only with ``allow_remote``.

    Attributes:
        host: The address that it listens on.
        port: Its port; 0 takes a free one.
        allowed_hosts: Further host names under which it may be addressed.
        allow_remote: Whether ``host`` may be beyond loopback. Answers are not encrypted.
    """

    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    allowed_hosts: tuple[str, ...] = ()
    allow_remote: bool = False


class EdgeTypesConfig(Section):
    """The weight of an edge of each type.

    Attributes:
        prefix_share: Between blocks that several requests walked in sequence.
        co_attend: Between blocks that the model attends to together, if attention is sampled.
        semantic: Between blocks with similar key embeddings, if these are sampled.
        temporal: From a block to the next one in its prompt.
        spill_link: From a block to its copies in colder tiers.
        memory_ref: From a block to the item of an external memory that it holds.
    """

    prefix_share: EdgeWeight = _PROFILE.edge_types[EdgeType.PREFIX_SHARE]
    co_attend: EdgeWeight = _PROFILE.edge_types[EdgeType.CO_ATTEND]
    semantic: EdgeWeight = _PROFILE.edge_types[EdgeType.SEMANTIC]
    temporal: EdgeWeight = _PROFILE.edge_types[EdgeType.TEMPORAL]
    spill_link: EdgeWeight = _PROFILE.edge_types[EdgeType.SPILL_LINK]
    memory_ref: EdgeWeight = _PROFILE.edge_types[EdgeType.MEMORY_REF]


class ScoreConfig(Section):
    """The weights of a score's terms, and the rules (see ``graph.ranking.policy.Rules``).

    A block with a higher score is evicted first. ``degree``, ``edge_weight``, ``importance`` and
    ``confidence`` also count in the default policy, within its bounds; the other weights are the
    classic formula's.

    Attributes:
        age: Weight of each second since the last use.
        degree: Weight of each edge, times the weight of its type.
        edge_weight: Weight of the sum of its edges' own weights, times the weight of their type.
        importance: Weight of a block's importance, in [0, 1].
        hit_count: Weight of the number of times that a block was hit.
    """

    age: Weight = _PROFILE.age
    degree: Weight = _PROFILE.degree
    edge_weight: Weight = _PROFILE.edge_weight
    importance: Weight = _PROFILE.importance
    confidence: Weight = _PROFILE.confidence
    hit_count: Weight = _PROFILE.hit_count
    session_credit: Weight = _PROFILE.session_credit
    session_memory_s: Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)] = (
        _PROFILE.session_memory_s
    )
    edge_types: EdgeTypesConfig = EdgeTypesConfig()
    protected_share: Share | None = _PROFILE.protected_share
    protected_price_points: Points = _PROFILE.protected_price_points
    tenant_share: Share = _PROFILE.tenant_share
    inferred_share: Share = _PROFILE.inferred_share
    reserved: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = _PROFILE.reserved
    protected_layers: frozenset[LayerName] = frozenset(
        layer.name.lower() for layer in _PROFILE.protected_layers
    )

    def weights(self) -> Weights:
        return Weights(**{each.name: getattr(self, each.name) for each in fields(Weights)})

    def rules(self, horizon_s: float) -> Rules:
        """Return the rules of every policy; a session that returns within ``horizon_s`` is due."""
        own = ScoreConfig.model_fields.keys() & {each.name for each in fields(Rules)}
        said = {name: getattr(self, name) for name in own} | {
            "edge_types": {kind: getattr(self.edge_types, kind.name.lower()) for kind in EdgeType},
            "protected_layers": frozenset(LAYER_BY_NAME[name] for name in self.protected_layers),
            "horizon_s": horizon_s,
        }
        return Rules(**said)


class PolicyConfig(Section):
    """Which policy ranks; takes effect at the next start.

    Attributes:
        name: ``lifecycle`` learns when sessions return, ``classic`` is the weighted sum of [score],
            ``lru`` leaves engines their own order, apart from protected blocks.
        guard: Whether LRU ranks until the policy has shown that it finds more, and whenever it
            finds less. Without the guard the policy ranks from the start, whatever that costs.
    """

    name: PolicyName = DEFAULT
    guard: bool = True

    def referee(self) -> Guard:
        """Return a new guard: it decides where the policy may rank and how much is protected."""
        return Guard(self.name, yields=self.guard and self.name != LruPolicy.name)

    def policy(self, weights: Weights) -> Policy:
        """Return a new policy; ``weights`` are used by policies that have weights."""
        return new_policy(self.name, weights)


class PrefetchConfig(Section):
    """The copies that engines with tiers load back before any request asks for them.

    Attributes:
        enabled: Whether copies are loaded back ahead of requests.
        max_blocks: The most blocks per order.
        horizon_s: Blocks of a session expected back within these seconds are loaded back now, and
            kept while other copies can be dropped instead.
    """

    enabled: bool = True
    max_blocks: Listed = 512
    horizon_s: Interval = 3.0


class TracingConfig(Section):
    """OpenTelemetry traces of requests; takes effect at the next start.

    Attributes:
        endpoint: An OTLP/HTTP endpoint, e.g. ``http://127.0.0.1:4318``. None: that of
            ``OTEL_EXPORTER_OTLP_ENDPOINT``; without it, nothing is sent.
    """

    endpoint: HttpUrl | None = None


class GraphConfig(Section):
    """Bounds on what the graph keeps (see ``graph.tables.tables.GraphLimits``).

    ``max_sessions`` and ``max_names`` size tables, and take effect at the next start.
    """

    max_ghosts: Size = _LIMITS.max_ghosts
    ghost_share: Annotated[float, Field(ge=0, le=4)] = _LIMITS.ghost_share
    max_sessions: Size = _LIMITS.max_sessions
    max_names: Size = _LIMITS.max_names
    max_pairs: Size = _LIMITS.max_pairs
    co_attend_after: Annotated[int, Field(ge=1, le=1000)] = _LIMITS.co_attend_after
    co_attend_half_life_s: Interval = _LIMITS.co_attend_half_life_s
    semantic_threshold: Annotated[float, Field(ge=0, le=1)] = _LIMITS.semantic_threshold
    semantic_neighbors: Annotated[int, Field(ge=1, le=256)] = _LIMITS.semantic_neighbors

    def limits(self) -> GraphLimits:
        return GraphLimits(**self.model_dump())
