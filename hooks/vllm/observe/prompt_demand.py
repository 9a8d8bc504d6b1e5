"""``PromptDemand``: how many blocks the next step can take for prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..pool.tap import Cached

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PromptDemand:
    """Follows the prompts that vLLM looked up and has not computed yet.

    A step takes at most one block for each request that decodes, and those of prompts that were
    looked up: vLLM schedules no request before it has asked what the prefix cache holds of it.
    A step computes at most its token budget of them. A load takes all of its blocks at once,
    whatever the budget.

    Args:
        block_size: Tokens of a block of the observed group.
        groups_take: Blocks that all groups take at most where that one takes a block.

    Attributes:
        prompts: Blocks of the observed group that looked-up prompts still need.
    """

    def __init__(self, block_size: int, groups_take: int = 1) -> None:
        self.prompts = 0
        self._block_size, self._groups_take = block_size, groups_take
        self._needs: dict[str, int] = {}  # request id → blocks of its tokens, when it was looked up
        self._has: dict[str, int] = {}  # and how many of them are computed
        self._loads: dict[str, int] = {}  # and how many of them a load can fill, if any
        self._loaded = 0  # the sum of these

    def most(self, decoding: int, fetched: int = 0) -> tuple[int, int, int]:
        """Blocks of all groups that the next step can take: for so many requests that decode, for
        prompts, and for loads, those of prompts and so many others that are ``fetched``."""
        take, loads = self._groups_take, fetched + self._loaded
        return take * decoding, take * self.prompts, take * loads

    def looked_up(self, request: Request, computed_tokens: int, to_load: int = 0) -> None:
        """Note that a step may begin to compute what ``request`` lacks, or to load ``to_load``
        tokens of it."""
        self.finished(request.request_id)
        if to_load:
            self._loads[request.request_id] = blocks = to_load // self._block_size
            self._loaded += blocks
        needs = 1 + request.num_tokens // self._block_size
        has = computed_tokens // self._block_size
        self._needs[request.request_id], self._has[request.request_id] = needs, has
        self.prompts += needs - has

    def cached(self, cached: Iterable[Cached]) -> None:
        """Note what was computed in a step."""
        needs = self._needs
        if not needs:
            return
        for request, _, _, end in cached:
            if request.request_id in needs:
                self._computed(request.request_id, end)

    def finished(self, request_id: str) -> None:
        """Note that a request takes no more blocks, or will be looked up again."""
        needs = self._needs.pop(request_id, None)
        self._loaded -= self._loads.pop(request_id, 0)
        if needs is not None:
            self.prompts -= needs - self._has.pop(request_id)

    def _computed(self, request_id: str, end: int) -> None:
        if end >= self._needs[request_id] - 1:
            self.finished(request_id)
        else:
            self.prompts -= end - self._has[request_id]
            self._has[request_id] = end
