"""Everything that the graph holds, and the limits on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from ..errors import GraphError
from ..types import MAX_ENGINES, NO_ROW
from .blocks import BlockTable, salt_of
from .columns import Interner, TenantNames
from .edges import AllEdges, EdgeStore
from .protection import ProtectionBudget, first_share
from .sessions import MemoryFacts, SessionTable
from .walks import (
    ChainLinks,
    EngineReports,
    ForkBook,
    RegretBook,
    WalkLog,
)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Bounds on what the graph keeps.

    Attributes:
        max_ghosts: Blocks remembered after their last copy is gone, unless pools are larger; see
            ``ghost_share``. Their history shows which blocks returned, and why a request missed.
        ghost_share: Blocks remembered in this way per block of the engines' pools, if that is more.
            Chosen: with 1, a simulated pool of twice the size knows all its blocks.
        max_sessions: Sessions remembered.
        max_names: Distinct segment names, tenants and memory ids, each. Names beyond it are not
            kept, but tenants are still told apart.
        max_pairs: Block pairs watched for CO_ATTEND that have no edge yet.
        co_attend_after: Co-occurrences after which a pair gets a CO_ATTEND edge.
        co_attend_half_life_s: Seconds after which an unused CO_ATTEND weight has halved.
        semantic_threshold: Cosine above which two blocks get a SEMANTIC edge.
        semantic_neighbors: Neighbours looked up for each embedded block.
        logs: Whether ``LoggedTables.history`` keeps anything.
    """

    max_ghosts: int = 65_536
    ghost_share: float = 1.0
    max_sessions: int = 100_000
    max_names: int = 65_536
    max_pairs: int = 65_536
    co_attend_after: int = 3
    co_attend_half_life_s: float = 300.0
    semantic_threshold: float = 0.8
    semantic_neighbors: int = 8
    logs: bool = True


@dataclass(slots=True)
class Tables:
    """The graph's data, shared by the modules that read and write it."""

    limits: GraphLimits
    blocks: BlockTable = field(init=False)
    links: ChainLinks = field(init=False)
    edges: EdgeStore = field(init=False)  # edges that do not follow from columns
    all_edges: AllEdges = field(init=False)
    sessions: SessionTable = field(init=False)
    segment_names: Interner = field(init=False)
    tenants: TenantNames = field(init=False)
    memories: Interner = field(init=False)
    forks: ForkBook = field(init=False)
    memory_facts: dict[int, MemoryFacts] = field(default_factory=dict)  # by memory number
    engines: dict[str, int] = field(default_factory=dict)  # engine id → residency column
    models: dict[int, str] = field(default_factory=dict)  # residency column → model
    pool_blocks: dict[int, int] = field(default_factory=dict)  # residency column → blocks
    changed: Counter[int] = field(default_factory=Counter)  # see ``turnover``
    listing: set[int] = field(default_factory=set)  # columns whose list of blocks is being received
    leaving: set[int] = field(default_factory=set)  # columns of engines that are being forgotten
    reports: defaultdict[int, EngineReports] = field(
        default_factory=lambda: defaultdict(EngineReports)
    )
    budgets: dict[int, ProtectionBudget] = field(default_factory=dict)  # by residency column
    protected_share: float | None = None  # for every pool; None: see ``budgets``
    walks: WalkLog = field(default_factory=WalkLog)
    regret: RegretBook = field(default_factory=RegretBook)

    def __post_init__(self) -> None:
        self.blocks = BlockTable()
        self.links = ChainLinks(self.blocks)
        self.edges = EdgeStore(self.blocks)
        self.all_edges = AllEdges(self.blocks, self.edges)
        self.sessions = SessionTable(self.limits.max_sessions, self.blocks.forget_sessions)
        self.forks = ForkBook(self.sessions)
        self.segment_names = Interner(self.limits.max_names)
        self.tenants = TenantNames(self.limits.max_names)
        self.memories = Interner(self.limits.max_names)

    def salt(self, engine: int) -> np.uint64:
        """Return the number that an engine's model mixes into the keys of its blocks."""
        return salt_of(self.models.get(engine, ""))

    def usable_blocks(self, engine: int) -> int:
        """Return how many blocks of an engine's pool can hold something; 0 if it never reported."""
        return max(0, self.pool_blocks.get(engine, 0) - 1)  # vLLM keeps one for itself

    def kept_share(self, engine: int) -> float:
        """Return the share of an engine's pool that may be kept whatever the scores are."""
        if self.protected_share is not None:
            return self.protected_share
        budget = self.budgets.get(engine)
        return budget.share if budget else first_share(self.usable_blocks(engine))

    def name_of(self, engine: int) -> str | None:
        """Return the id of the engine in a residency column; None if there is none."""
        for name, column in self.engines.items():  # a generator costs as much again
            if column == engine:
                return name
        return None

    def reports_of(self, engine: str) -> EngineReports:
        return self.reports.get(self.engines.get(engine, NO_ROW)) or EngineReports()

    def may_have_tiers(self, engine: int) -> bool:
        """Return whether the engine in a residency column has tiers, or has not reported yet."""
        reports = self.reports.get(engine)
        return reports is None or reports.may_have_tiers

    def turnover(self, engine: str) -> tuple[int, int]:
        """Return how many changes an engine's blocks had, and its pool size (0 if never reported).

        Changes are blocks stored, ever, and blocks of requests that ended, whose rank depends on
        how they ended.
        """
        column = self.engines.get(engine, NO_ROW)
        return self.changed[column], self.pool_blocks.get(column, 0)

    def is_listing(self, engine: str) -> bool:
        """Return whether this engine's list of blocks is being received, so partly known."""
        return self.engines.get(engine, NO_ROW) in self.listing

    def emptied(self, engine: int, now: float) -> None:
        self.walks.forget(engine)
        self.budgets.pop(engine, None)
        self.regret.clear(engine, now)

    def left(self, engine: int) -> None:
        """Forget the activity of an engine that is gone or runs another model."""
        self.walks.forget(engine)
        self.regret.forget(engine)
        self.budgets.pop(engine, None)

    def column_of(self, engine: str, model: str) -> int:
        """Return the engine's residency column. A new engine gets a free column, with ``model``
        unless it names its own. Raises GraphError if all columns are taken.
        """
        if engine not in self.engines:
            free = sorted(set(range(MAX_ENGINES)) - set(self.engines.values()) - self.leaving)
            if not free:
                raise GraphError(
                    f"a sidecar advises at most {MAX_ENGINES} engines at once; "
                    "start another one for this engine"
                )
            self.blocks.reserve_engines(free[0] + 1)
            self.engines[engine] = free[0]
            self.models[free[0]] = model
        return self.engines[engine]
