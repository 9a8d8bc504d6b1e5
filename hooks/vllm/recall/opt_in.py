"""Decides which requests take part in recall, and which text each of them may see."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...recall.spans import Domain, TokenBytes

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ...requests.hints import CheckedHints

MOST_SESSIONS: Final = 4096  # sessions whose last branch is kept; chosen
MOST_TOKENS: Final = 1 << 25  # tokens of all branches: some 300 MiB with their hashes; chosen
_NONCE_BYTES: Final = 16

Owner = tuple[Domain, str]  # a named session: its domain, and its name


@dataclass(frozen=True, slots=True)
class _Branch:
    tokens: TokenBytes  # the tokens of its whole blocks
    # hashes of these blocks; from the first approximate one on they derive from a nonce
    hashes: Sequence[bytes]
    exact: int  # number of blocks before the first approximate one


class OwnBranches:
    """Gives a session's approximate blocks hashes that only the session's later requests can find.

    vLLM hashes a block's tokens together with the previous hash. Once one hash derives from a
    nonce, so do all later ones, including those of future blocks: only a request whose hashes were
    rewritten in the same way finds them.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._branches: OrderedDict[Owner, _Branch] = OrderedDict()
        self._tokens = 0  # of all of them

    def begin(self, request: Request, exact: int) -> bool:
        """Rewrite hashes from block ``exact`` on; return False if there is no such block yet."""
        hashes: list[bytes] = request.block_hashes
        if len(hashes) <= exact or request.resumable:
            return False
        nonce, plain = secrets.token_bytes(_NONCE_BYTES), hashes[exact]
        hashes[exact:] = [hashlib.blake2b(plain, key=nonce, digest_size=len(plain)).digest()]
        request.update_block_hashes()
        return True

    def follow(self, request: Request, owner: Owner) -> int | None:
        """Rewrite hashes to match the session's last branch, as far as the text is the same.

        Returns the number of exact blocks; None if the text differs before the first approximate
        one.
        """
        branch = self._branches.get(owner)
        if branch is None or request.resumable:
            return None
        tokens = TokenBytes.of(request.all_token_ids[: len(branch.tokens)])
        same = branch.tokens.common(0, tokens, 0) // self._size
        if min(same, len(request.block_hashes)) <= branch.exact:
            return None
        request.block_hashes[:] = branch.hashes[:same]
        request.update_block_hashes()
        return branch.exact

    def keep(self, request: Request, owner: Owner, exact: int, whole: int) -> None:
        """Remember the session's branch: the first ``whole`` blocks that an approximate request
        left, of which the first ``exact`` are exact.
        """
        # A request that ended before it computed what its session had leaves nothing new.
        tokens = TokenBytes.of(request.all_token_ids[: whole * self._size])
        known = self._branches.get(owner)
        if known is not None and known.tokens.raw.startswith(tokens.raw) and known.tokens != tokens:
            return
        self._forget(owner)
        self._branches[owner] = _Branch(tokens, list(request.block_hashes[:whole]), exact)
        self._tokens += len(tokens)
        while len(self._branches) > MOST_SESSIONS or self._tokens > MOST_TOKENS:
            self._forget(next(iter(self._branches)))

    def clear(self) -> None:
        self._branches.clear()
        self._tokens = 0

    def _forget(self, owner: Owner) -> None:
        if (branch := self._branches.pop(owner, None)) is not None:
            self._tokens -= len(branch.tokens)


class OptIn:
    """Remembers for each running request whether it opted in, and whose text it may use."""

    def __init__(
        self, everybody: bool, meaning: Callable[[Request], CheckedHints], shared: bool = False
    ) -> None:
        self._everybody, self._meaning, self._shared = everybody, meaning, shared
        self._ownerless: set[str] = set()  # running requests that ask, but name no owner
        self._domains: dict[str, Domain | None] = {}
        self._owners: dict[str, Owner] = {}

    def owner(self, request: Request) -> Owner | None:
        """Return the named session of an opted-in request; None if it has none."""
        return self._owners.get(request.request_id) if self.domain(request) else None

    def domain(self, request: Request) -> Domain | None:
        """Return the domain whose text a request may use and add to; None if it did not opt in.
        Must first be called before the request is scheduled.
        """
        if request.request_id not in self._domains:
            self._domains[request.request_id] = self._read(request)
        return self._domains[request.request_id]

    def has_no_owner(self, request_id: str) -> bool:
        """Return whether a request asked for recall without naming an owner of its text."""
        return request_id in self._ownerless

    def forget(self, request_id: str) -> None:
        self._ownerless.discard(request_id)
        self._domains.pop(request_id, None)
        self._owners.pop(request_id, None)

    def _read(self, request: Request) -> Domain | None:
        # Tokens describe the content only if plain weights were given nothing but text.
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
                self._ownerless.add(request.request_id)
        elif meaning.session is not None:
            self._owners[request.request_id] = domain, meaning.session
        return domain

    def _domain(self, salt: str | None, meaning: CheckedHints) -> Domain | None:
        """Return a tenant's domain, or that of a cache salt, or else a session's own."""
        if self._shared or salt or meaning.tenant:
            return salt or "", meaning.tenant or "", ""
        return None if meaning.session is None else ("", "", meaning.session)
