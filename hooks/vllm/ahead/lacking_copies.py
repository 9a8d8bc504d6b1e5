"""``LackingCopies``: which copies a request waits for that is not looked up by vLLM yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...tiers.directory import CopyDirectory

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..observe.group import ObservedGroup


class LackingCopies:
    """What the pool lacks of one request's prompt; looked up once, and then given out in parts.

    Args:
        group: The observed KV cache group.
        directory: Where the copies are.
        is_there: Whether a block, by its hash, is in the pool or on its way there.
        is_faster: Whether a request's load of blocks takes no longer than computing them.
    """

    def __init__(
        self,
        group: ObservedGroup,
        directory: CopyDirectory,
        is_there: Callable[[bytes], bool],
        is_faster: Callable[[str, Sequence[bytes]], bool],
    ) -> None:
        self._group, self._directory = group, directory
        self._is_there, self._is_faster = is_there, is_faster
        self._request_id = ""
        self._left: list[bytes] = []

    def take(self, request: Request, most: int) -> tuple[list[bytes], bool]:
        """Hashes of the next blocks to load for ``request``, ``most`` at most, and whether those
        are the last."""
        if request.request_id != self._request_id:
            self._request_id, self._left = request.request_id, self._look_up(request)
        taken, self._left = self._left[:most], self._left[most:]
        # Since the lookup, copies may have gone and blocks may have come.
        found = [each for each in taken if each in self._directory and not self._is_there(each)]
        return found[: self._directory.run(found)], not self._left

    def _look_up(self, request: Request) -> list[bytes]:
        """Blocks with copies that a match would reach; none where computing them is faster."""
        found: list[bytes] = []
        # The last token is always computed: its logits are what the request wants.
        for block_hash in self._group.hashes(request, request.num_tokens - 1):
            if self._is_there(block_hash):
                continue
            if block_hash not in self._directory:
                break
            found.append(block_hash)
        found = found[: self._directory.run(found)]
        return found if found and self._is_faster(request.request_id, found) else []
