"""Takes the place of bridge and worker in an engine without tiers; does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ....graph.messages.advice import EvictionRanking
from ....graph.messages.events import AnyEvent
from ....graph.types import Keys
from ...tiers.jobs import TierAnswer, TierWork
from .spiller import StepTaken

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from ..pool.tap import Cached, Changes


class NoTiers:
    """The bridge of an engine whose blocks have no copies; see ``TierCacheBridge``."""

    keeps_promises = False
    busy = owes = False
    reports: tuple[Callable[[], AnyEvent], ...] = ()

    def request_queued(self, request: Request) -> None:
        """Do nothing."""

    def request_unqueued(self, request_id: str) -> None:
        """Do nothing."""

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Say that no load brings anything."""
        return 0, False

    def foresee(self, to_load: int) -> None:
        """Nothing is loaded."""

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """Do nothing: nothing is to be loaded."""

    def retire(self) -> None:
        """Do nothing: nothing was promised."""

    def request_resumed(self, request_id: str) -> None:
        """Do nothing: no load was promised."""

    def promise_ended(self, request_id: str) -> None:
        """Do nothing: no load was promised."""

    def request_finished(self, request_id: str) -> dict[str, Any] | None:
        """Do nothing."""
        return None

    def fail_load(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Do nothing: the user's own connector promised the load."""

    def offered(self, wanted: Callable[[], Keys | None]) -> int:
        """0: nothing can be brought back."""
        return 0

    def step(self, ranking: EvictionRanking | None, offered: int, step: StepTaken) -> None:
        """Do nothing: there are no workers."""

    def outstanding(self) -> None:
        """Return no orders: there are no workers."""

    def step_ended(self) -> None:
        """Do nothing."""

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Do nothing: no worker answers."""

    def drop_copies(self) -> bool:
        """Allow the reset: there are no copies."""
        return True

    def copied(self, hashes: Sequence[bytes]) -> int:
        """0: no block can be brought back."""
        return 0

    def copies(self) -> list[AnyEvent]:
        """No copies."""
        return []

    def adapted(self, keys: Sequence[int]) -> None:
        """Do nothing."""

    def changed(self, changes: Changes) -> None:
        """Do nothing."""

    def lend(self) -> list[KVCacheBlock]:
        """No blocks: no load of ours fills any."""
        return []

    def renewed(self) -> None:
        """Do nothing: no load is under way."""


class NoRecall:
    """An engine in which nothing comes back at another position; see ``SpanRecall``."""

    exact: Mapping[str, int] = MappingProxyType({})

    @property
    def busy(self) -> bool:
        """False: there is nothing to do in another step."""
        return False

    def request_queued(self, request: Request) -> None:
        """Do nothing."""

    def looked_up(
        self, request: Request, first: int, answer: tuple[int | None, bool]
    ) -> tuple[int | None, bool]:
        """Leave the answer as it is."""
        return answer

    def spliced(self, request: Request, to_load: int) -> int:
        """0: no token comes from another position."""
        return 0

    def request_scheduled(self, request: Request, ids: Sequence[int], to_load: int) -> bool:
        """Begin nothing."""
        return False

    def request_finished(self, request_id: str) -> dict[str, Any] | None:
        """Keep nothing."""
        return None

    def cached(self, runs: Sequence[Cached]) -> None:
        """Do nothing."""

    def take_due(self) -> list[bytes]:
        """No blocks."""
        return []

    def clear(self) -> None:
        """Do nothing."""


class NoWorker:
    """A process without a shard of the tiers; see ``WorkerSide``."""

    def register(self, views: dict[str, Any]) -> None:
        """Do nothing."""

    def submit(self, work: TierWork) -> None:
        """Do nothing."""

    def take_finished(self) -> set[str]:
        """No requests: none waits for a load."""
        return set()

    def take_failed(self) -> set[int]:
        """No blocks: no load failed."""
        return set()

    def take_answer(self) -> TierAnswer:
        """No answer: nothing was asked."""
        return TierAnswer()

    def close(self) -> None:
        """Do nothing."""
