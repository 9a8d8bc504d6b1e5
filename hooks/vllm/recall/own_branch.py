"""``OwnBranches``: lets a session find its own approximate blocks again, and nobody else."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...recall.said_blocks import Domain
from ...recall.said_text import SaidText

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_SESSIONS: Final = 4096  # whose last branch is kept; chosen
MOST_TOKENS: Final = 1 << 25  # of all branches: some 300 MiB with their hashes; chosen
_NONCE_BYTES: Final = 16

Owner = tuple[Domain, str]
"""A session: whose text it is, and its name."""


@dataclass(frozen=True, slots=True)
class _Branch:
    """What a session's last approximate request left.

    Attributes:
        tokens: Of its whole blocks.
        hashes: Of these blocks; from the first approximate one on they follow from a nonce.
        exact: Blocks before that one.
    """

    tokens: SaidText
    hashes: Sequence[bytes]
    exact: int


class OwnBranches:
    """Rewrites hashes of a request's blocks from its first approximate one on.

    vLLM makes a block's hash from its tokens and the hash before it. If one of them follows from a
    nonce, so do all behind it, those of blocks that are yet to come too: no request finds them but
    one whose hashes are rewritten alike.

    Args:
        block_size: Tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._branches: OrderedDict[Owner, _Branch] = OrderedDict()
        self._tokens = 0  # of all of them

    def begin(self, request: Request, exact: int) -> bool:
        """Rewrite hashes from block ``exact`` on; False where there is no such block yet."""
        hashes: list[bytes] = request.block_hashes
        if len(hashes) <= exact or request.resumable:
            return False
        nonce, plain = secrets.token_bytes(_NONCE_BYTES), hashes[exact]
        hashes[exact:] = [hashlib.blake2b(plain, key=nonce, digest_size=len(plain)).digest()]
        request.update_block_hashes()
        return True

    def follow(self, request: Request, owner: Owner) -> int | None:
        """Rewrite hashes as those of the session's last branch, as far as the text is the same.

        Returns how many blocks are exact; None where the text differs before the first other one.
        """
        branch = self._branches.get(owner)
        if branch is None or request.resumable:
            return None
        tokens = SaidText.of(request.all_token_ids[: len(branch.tokens)])
        same = branch.tokens.common(0, tokens, 0) // self._size
        if min(same, len(request.block_hashes)) <= branch.exact:
            return None
        request.block_hashes[:] = branch.hashes[:same]
        request.update_block_hashes()
        return branch.exact

    def keep(self, request: Request, owner: Owner, exact: int, whole: int) -> None:
        """Keep what an approximate request left: ``whole`` blocks, the first ``exact`` exact.

        A request that ended before it had computed what its session had before leaves nothing new.
        """
        tokens = SaidText.of(request.all_token_ids[: whole * self._size])
        known = self._branches.get(owner)
        if known is not None and known.tokens.raw.startswith(tokens.raw) and known.tokens != tokens:
            return
        self._forget(owner)
        self._branches[owner] = _Branch(tokens, list(request.block_hashes[:whole]), exact)
        self._tokens += len(tokens)
        while len(self._branches) > MOST_SESSIONS or self._tokens > MOST_TOKENS:
            self._forget(next(iter(self._branches)))

    def clear(self) -> None:
        """Forget all branches."""
        self._branches.clear()
        self._tokens = 0

    def _forget(self, owner: Owner) -> None:
        if (branch := self._branches.pop(owner, None)) is not None:
            self._tokens -= len(branch.tokens)
