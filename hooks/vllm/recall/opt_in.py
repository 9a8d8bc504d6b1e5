"""``OptIn``: which requests' text is kept and brought back, and whose text it is."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from ...recall.spans import Domain, SaidText
from ...settings import OFF, ON, RECALL_VARIABLE

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ...requests.hints import Meaning

# ``OwnBranches``: lets a session find its own approximate blocks again, and nobody else.

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


logger = logging.getLogger(__name__)


class Switch(Enum):
    """Whose requests are approximate where spans are held."""

    NOBODY = "0"
    WHO_ASKS = ""
    EVERYBODY = "1"


def recall_switch() -> Switch:
    """What the environment says; a value that means nothing leaves a warning, and changes nothing:
    nobody's answers are to become approximate by a slip of the pen."""
    value = os.environ.get(RECALL_VARIABLE, "").strip().lower()
    if value in OFF:
        return Switch.NOBODY
    if value in ON:
        return Switch.EVERYBODY
    if value:
        logger.warning(
            "%s=%r; allowed: 1 (all requests), 0 (none), or unset (those that ask): taken as unset",
            RECALL_VARIABLE, value[:40],
        )  # fmt: skip
    return Switch.WHO_ASKS


class OptIn:
    """Knows of each request under way whether it opted in.

    Args:
        everybody: Whether a request that says nothing opted in.
        meaning: What a request's caller says.
        shared: Whether all who name no tenant and have no cache salt may see one another.
    """

    def __init__(
        self, everybody: bool, meaning: Callable[[Request], Meaning], shared: bool = False
    ) -> None:
        self._everybody, self._meaning, self._shared = everybody, meaning, shared
        self._nobodys: set[str] = set()  # requests under way that ask, and say not whose they are
        self._domains: dict[str, Domain | None] = {}
        self._owners: dict[str, Owner] = {}

    def owner(self, request: Request) -> Owner | None:
        """Which named session an opted-in request belongs to; None without."""
        return self._owners.get(request.request_id) if self.domain(request) else None

    def domain(self, request: Request) -> Domain | None:
        """Whose text a request may use and leave; None if it did not opt in.

        It is asked for the first time before the request is scheduled.
        """
        if request.request_id not in self._domains:
            self._domains[request.request_id] = self._read(request)
        return self._domains[request.request_id]

    def is_nobodys(self, request_id: str) -> bool:
        """Whether a request asked in words, and does not say whose text it is."""
        return request_id in self._nobodys

    def forget(self, request_id: str) -> None:
        """Note that a request ended."""
        self._nobodys.discard(request_id)
        self._domains.pop(request_id, None)
        self._owners.pop(request_id, None)

    def _read(self, request: Request) -> Domain | None:
        # Tokens say all of the content only where plain weights were given nothing else than text.
        if request.mm_features or request.prompt_embeds is not None or request.lora_request:
            return None
        if request.skip_reading_prefix_cache:
            return None
        meaning = self._meaning(request)
        wanted = self._everybody if meaning.recall is None else meaning.recall
        if not wanted:
            return None
        domain = self._domain(request.cache_salt, meaning)
        if domain is None:
            if meaning.recall:
                self._nobodys.add(request.request_id)
        elif meaning.session is not None:
            self._owners[request.request_id] = domain, meaning.session
        return domain

    def _domain(self, salt: str | None, meaning: Meaning) -> Domain | None:
        """Who may see one another: a tenant, those with one salt, else a session alone."""
        if self._shared or salt or meaning.tenant:
            return salt or "", meaning.tenant or "", ""
        return None if meaning.session is None else ("", "", meaning.session)
