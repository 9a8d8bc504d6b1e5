"""An engine without tiers: what stands where bridge and worker would, and has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ....graph.messages.advice import EvictionRanking
from ....graph.messages.events import AnyEvent
from ....graph.types import Keys
from ...tiers.jobs import TierAnswer, TierWork

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class NoTiers:
    """The bridge of an engine whose blocks have no copies; see ``TierCacheBridge``."""

    keeps_promises = False
    busy = False
    reports: tuple[Callable[[], AnyEvent], ...] = ()

    def request_queued(self, request: Request) -> None:
        """Nothing is planned for requests."""

    def request_unqueued(self, request_id: str) -> None:
        """Nothing was planned."""

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """No load brings anything."""
        return 0, False

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """Nothing is to be loaded."""

    def request_resumed(self, request_id: str) -> None:
        """No load was promised."""

    def request_finished(self, request_id: str) -> None:
        """Nothing is remembered of requests."""

    def fail_load(self, request: Request, blocks: KVCacheBlocks) -> None:
        """It is no load of ours: the user's own connector promised it."""

    def step(self, ranking: EvictionRanking | None, wanted: Keys | None, tokens: int) -> None:
        """There are no workers to tell anything."""

    def outstanding(self) -> None:
        """There are no workers to tell anything."""

    def step_ended(self) -> None:
        """Nothing is measured."""

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """No worker answers."""

    def drop_copies(self) -> bool:
        """There are none."""
        return True

    def copied(self, hashes: Sequence[bytes]) -> int:
        """No block can be brought back."""
        return 0

    def copies(self) -> list[AnyEvent]:
        """There are none."""
        return []

    def adapted(self, keys: Sequence[int]) -> None:
        """It matters to copies only."""

    def evicted(self, keys: Sequence[int]) -> None:
        """It matters to copies only."""

    def clear(self) -> None:
        """There is nothing to forget."""

    def lend(self) -> list[KVCacheBlock]:
        """No load of ours fills a block."""
        return []

    def renewed(self) -> None:
        """No load is under way."""


class NoWorker:
    """A process without a shard of the tiers; see ``WorkerSide``."""

    def register(self, views: dict[str, Any]) -> None:
        """Nothing moves."""

    def submit(self, work: TierWork) -> None:
        """Nothing moves."""

    def take_finished(self) -> set[str]:
        """No request waits for a load."""
        return set()

    def take_failed(self) -> set[int]:
        """No load failed."""
        return set()

    def take_answer(self) -> TierAnswer:
        """Nothing was asked."""
        return TierAnswer()

    def close(self) -> None:
        """There is nothing to let go."""
