"""``SpanRecall``: splices copies of a prompt's text at their new position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from ...keys import key_of
from ...recall.cover import SpliceLimits, cover
from ...recall.spans import Domain, Piece, SpanIndex, Tokens
from ...settings import RECALL_SHARED_VARIABLE
from ...tiers.directory import Copy, CopyDirectory
from ...tiers.jobs import SpliceRun
from ...tiers.ledger import TierLedger
from ..tiers.loader import Loader, Splice
from ..tiers.spiller import Spiller
from .opt_in import OptIn, OwnBranches
from .own_text import ExactOnly, OwnText, PromptSources

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from ..calls import BlockIds, Found, Told
    from ..groups import ObservedGroup
    from ..tap import Changes

_AGAIN_S: Final = 0.1  # after this, a waiting request is matched again if anything changed; chosen


@dataclass(frozen=True, slots=True)
class SplicePlan:
    """What a load brings for one request. ``lost`` and ``version`` are the directory's count of
    lost copies and the index's version when the plan was made.
    """

    first: int  # blocks that the pool holds
    loaded: int  # blocks with exact copies after those
    pieces: tuple[Piece, ...]  # what is spliced after these
    at: float  # when the plan was made, monotonic seconds
    lost: int
    version: int

    @property
    def spliced(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


class SplicePlans:
    """Plans splices at look-up, and keeps them until requests are given their blocks."""

    def __init__(
        self, group: ObservedGroup, ledger: TierLedger, index: SpanIndex, limits: SpliceLimits
    ) -> None:
        self._group, self._ledger = group, ledger
        self._index, self._limits = index, limits
        self._plans: dict[str, SplicePlan] = {}

    def plan(
        self, request: Request, domains: Callable[[], Collection[Domain]], first: int, exact: int
    ) -> SplicePlan:
        """Return what can be spliced behind the exact part; vLLM asks in every step."""
        loaded, known = exact // self._group.block_size, self._plans.get(request.request_id)
        if known is None or (known.first, known.loaded) != (first, loaded) or self._is_old(known):
            ledger, start = self._ledger, (first + loaded) * self._group.block_size
            pieces = self._cover(request, domains(), start, exact)
            lost, version = ledger.directory.lost, self._index.version
            known = SplicePlan(first, loaded, pieces, ledger.clock(), lost, version)
            self._plans[request.request_id] = known
        return known

    def spliced(self, request_id: str, to_load: int) -> int:
        if (plan := self._plans.get(request_id)) is None:
            return 0
        return plan.spliced if to_load > plan.loaded * self._group.block_size else 0

    def take(self, request_id: str) -> SplicePlan | None:
        """Remove and return a request's plan, when it is given its blocks or ends."""
        return self._plans.pop(request_id, None)

    def _is_old(self, plan: SplicePlan) -> bool:
        directory, version = self._ledger.directory, self._index.version
        if (plan.lost, plan.version) == (directory.lost, version):
            return False
        segments = (segment for piece in plan.pieces for segment in piece.segments)
        is_lost = any(directory.warm(segment.block_hash) is None for segment in segments)
        return is_lost or self._ledger.clock() - plan.at > _AGAIN_S

    def _cover(
        self, request: Request, domains: Collection[Domain], start: int, exact: int
    ) -> tuple[Piece, ...]:
        """Find pieces from ``start`` on; none if computing them would be faster."""
        if not domains:
            return ()
        directory, last = self._ledger.directory, request.num_tokens - 1
        behind = self._group.hashes(request, last)[start // self._group.block_size :]
        if last - start < self._limits.least_tokens or (not exact and directory.run(behind)):
            return ()  # the latter: exact copies exist, and computing was found to be faster

        def usable(block_hash: bytes) -> bool:
            return directory.warm(block_hash) is not None

        tokens = tokens_of(request, last)
        before = last_of(self._group.hashes(request, start))
        pieces = cover(self._index, domains, tokens, start, usable, self._limits, before)
        if not pieces:
            return ()
        read = sum(len(piece.segments) for piece in pieces) * self._ledger.block_bytes
        spliced = sum(piece.tokens for piece in pieces)
        worth = self._ledger.costs.worth_splicing(spliced, read, loads=bool(exact))
        return tuple(pieces) if worth else ()


def last_of(hashes: Sequence[bytes]) -> bytes:
    return hashes[-1] if hashes else b""


def tokens_of(request: Request, count: int) -> Tokens:
    return np.array(request.all_token_ids[:count], dtype=np.int64)


def splice_of(
    pieces: Sequence[Piece],  # adjoining pieces, from the prompt's first approximate token on
    ids: Sequence[int],  # all of the request's block ids
    block_size: int,  # tokens per block
    directory: CopyDirectory,  # holds the copies; all of them are in memory
) -> Splice:
    """Return the splice that loads ``pieces`` into a request's blocks; pins their copies."""
    copies: dict[bytes, Copy] = {}

    def number(block_hash: bytes) -> int:
        copy = copies.get(block_hash) or directory.warm(block_hash)
        assert copy is not None, "a copy that was counted on is gone"
        copies[block_hash] = copy
        return copy.id

    runs = tuple(run for piece in pieces for run in _runs(piece, ids, block_size, number))
    for copy in copies.values():
        copy.pins += 1
        directory.all_leave((copy.block_hash,))  # wanted now
    last = pieces[-1].at + pieces[-1].tokens
    written = ids[pieces[0].at // block_size : -(-last // block_size)]
    return Splice(runs, tuple(written), tuple(copies.values()))


def _runs(
    piece: Piece, ids: Sequence[int], block_size: int, number: Callable[[bytes], int]
) -> Iterator[SpliceRun]:
    """Split a piece's segments at the borders of the request's blocks."""
    at = piece.at
    for block_hash, first, tokens in piece.segments:
        end = first + tokens
        while first < end:
            within = at % block_size
            count = min(end - first, block_size - within)
            slot = ids[at // block_size] * block_size + within
            yield SpliceRun(number(block_hash), first, slot, count, piece.delta)
            at, first = at + count, first + count


_COPIED_PER_STEP: Final = 256  # blocks; chosen
_MOST_DUE: Final = 65_536  # blocks waiting to be copied; chosen


class WantedCopies:
    """Asks for copies of opted-in requests' blocks once computed, and before eviction."""

    def __init__(self, ledger: TierLedger) -> None:
        self._ledger = ledger
        self._due: deque[bytes] = deque(maxlen=_MOST_DUE)

    @property
    def due(self) -> bool:
        """Whether blocks are still waiting to be copied."""
        return bool(self._due)

    def add(self, hashes: Sequence[bytes]) -> None:
        wanted = self._ledger.wanted
        wanted.update(dict.fromkeys(map(key_of, hashes)))
        for key in list(islice(wanted, max(0, len(wanted) - _MOST_DUE))):
            del wanted[key]
        self._due.extend(each for each in hashes if each not in self._ledger.directory)

    def keep_here(self, hashes: Sequence[bytes]) -> None:
        """Keep copies of these blocks off the disk, so that they end with this process."""
        self._ledger.kept_off_disk.update(map(key_of, hashes))

    def take(self) -> list[bytes]:
        count = min(_COPIED_PER_STEP, len(self._due))
        return list(dict.fromkeys(self._due.popleft() for _ in range(count)))


NO_OWNER: Final = (
    "it says not whose text it is: name its session or tenant, or send a cache salt "
    f"(or have the operator set {RECALL_SHARED_VARIABLE}=1)"
)


class SpanRecall:
    """Loads opted-in prompts: exact prefix, exact copies, then spans of other copies."""

    def __init__(
        self,
        group: ObservedGroup,  # the observed KV cache group
        ledger: TierLedger,  # records copies
        loader: Loader,  # begins loads
        spiller: Spiller,  # begins copies
        index: SpanIndex,  # the text of opted-in requests' blocks
        limits: SpliceLimits,  # what the model's calibration allows
        opt_in: OptIn,  # which requests asked for recall
        exact_only: ExactOnly,  # keeps approximate blocks out of the prefix cache
    ) -> None:
        self._group, self._ledger, self._loader, self._spiller = group, ledger, loader, spiller
        self._index, self._plans = index, SplicePlans(group, ledger, index, limits)
        self._opt_in, self.exact_only = opt_in, exact_only
        self._running: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}
        self._branches = OwnBranches(group.block_size)
        self._own = OwnText(index, group.block_size, opt_in, limits.most_generations)
        self._tried: set[str] = set()  # spliced once: if that failed, it would fail again
        self.exact = ledger.exact
        self.copies = WantedCopies(ledger)  # copies wanted of opted-in requests' blocks

    def on_new_request(self, request: Request) -> None:
        """Let a session's request find the session's approximate blocks, before any look-up."""
        owner = self._opt_in.owner(request)
        if owner is not None and request.request_id not in self.exact:
            exact = self._branches.follow(request, owner)
            if exact is not None:
                self.exact[request.request_id] = exact * self._group.block_size

    def get_num_new_matched_tokens(
        self, request: Request, computed_tokens: int, found: Found
    ) -> Found:
        """Return how many tokens a load can bring: exact ones found, and those spliced."""
        exact, _ = found
        domain = self._opt_in.domain(request)
        if exact is None or domain is None:
            return found

        def domains() -> Sequence[Domain]:
            tried = request.request_id in self._tried
            return () if tried else self._own.domains(request, domain)

        first = computed_tokens // self._group.block_size
        plan = self._plans.plan(request, domains, first, exact)
        return (exact + plan.spliced, True) if plan.pieces else found

    def spliced(self, request: Request, to_load: int) -> int:
        return self._plans.spliced(request.request_id, to_load)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, to_load: int
    ) -> None:
        begun = self._begins(request, blocks, to_load)
        self._loader.update_state_after_alloc(request, blocks, 0 if begun else to_load)

    def _begins(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> bool:
        """Whether something is spliced, so that the load was begun here."""
        if self._opt_in.domain(request) is None:
            return False
        self._running[request.request_id] = self._prefilling[request.request_id] = request
        spliced, size = self.spliced(request, to_load), self._group.block_size
        plan = self._plans.take(request.request_id)
        if plan is None:  # a request that has blocks already, as after a load, is not looked up
            self._note_read(request, request.num_computed_tokens)
            return False
        whole = plan.first + plan.loaded
        self._note_read(request, whole * size, plan.pieces if spliced else ())
        if not spliced:
            return False
        self._set_apart(request, whole)
        self._tried.add(request.request_id)
        hashes = self._group.hashes(request, whole * size)[plan.first :]
        ids = blocks.get_block_ids()[self._group.index]
        splice = splice_of(plan.pieces, ids, size, self._ledger.directory)
        self._loader.begin(request.request_id, hashes, ids[plan.first : whole], splice)
        return True

    def request_finished(self, request: Request, _: BlockIds) -> Told:
        """Index an ended request's text, and return its usage if it opted in."""
        request_id = request.request_id
        known, read = self._running.pop(request_id, None), self._own.read(request_id)
        refused = self._opt_in.has_no_owner(request_id)
        if known is not None:
            self._keep(known)
        self._plans.take(request_id)
        self._prefilling.pop(request_id, None)
        self._opt_in.forget(request_id)
        self._own.forget(request_id)
        self.exact_only.forget(request_id)
        self.exact.pop(request_id, None)
        self._tried.discard(request_id)
        if refused:
            return {"kvgraph": {"recall": {"refused": NO_OWNER}}}
        if known is None or read is None:
            return None
        return {"kvgraph": {"recall": _usage(read, request.num_prompt_tokens)}}

    def changed(self, changes: Changes) -> None:
        """Keep newly cached blocks that are approximate off the disk."""
        for request, _, first, end in changes.cached if self.exact else ():
            exact = self.exact.get(request.request_id)
            if exact is not None:
                size = self._group.block_size
                hashes = self._group.hashes(request, end * size)
                self.copies.keep_here(hashes[max(first, exact // size) :])
        if changes.then_reset:
            self.reset_cache()

    def copy_due(self) -> None:
        self._spiller.copy(self.take_due(), self._group.suffix)

    def take_due(self) -> list[bytes]:
        """Return the hashes of blocks to copy now, while they are certainly in the pool."""
        for request in list(self._prefilling.values()):
            if request.num_computed_tokens >= request.num_prompt_tokens:
                # Its request holds it: at the turn's end, others may take the blocks at once.
                del self._prefilling[request.request_id]
                self.copies.add(self._kept_blocks(request))
        return self.copies.take()

    def has_pending_push_work(self) -> bool:
        return self.copies.due

    def reset_cache(self) -> bool:
        """Forget all text, because the bytes behind it are no longer valid."""
        self._index.clear()
        self._branches.clear()
        return True

    def _note_read(self, request: Request, found: int, pieces: Sequence[Piece] = ()) -> None:
        exact = min(found, self.exact.get(request.request_id, found))
        own = self._group.hashes(request, found)[exact // self._group.block_size :]
        self._own.begun(request, exact, found, last_of(own), pieces)

    def _keep(self, request: Request) -> None:
        size, exact = self._group.block_size, self.exact.get(request.request_id)
        if exact is not None:
            self._keep_branch(request, exact // size, _computed(request) // size)
        hashes, domain = self._kept_blocks(request), self._opt_in.domain(request)
        if hashes and domain is not None:
            known = len(hashes) if exact is None else min(len(hashes), exact // size)
            tokens = tokens_of(request, len(hashes) * size)
            self._index.add(domain, hashes[:known], tokens)
            self._own.keep(request, hashes, tokens, known)
            self.copies.add(hashes)

    def _kept_blocks(self, request: Request) -> Sequence[bytes]:
        """Return hashes of computed blocks to splice later: exact ones, and a session's own."""
        size, computed = self._group.block_size, _computed(request)
        exact = self.exact.get(request.request_id, computed)
        own = self._own.enters and self._has_branch(request)
        kept = computed if own else min(computed, exact)
        return self._group.hashes(request, kept // size * size)

    def _set_apart(self, request: Request, exact: int) -> None:
        """Hide blocks from ``exact`` on: found by the request's session alone, or by nobody."""
        # New names are needed even where the request continues its session's last branch: that
        # one's blocks were computed, and hold something else.
        tokens = exact * self._group.block_size
        self.exact[request.request_id] = min(tokens, self.exact.get(request.request_id, tokens))
        mine = self._opt_in.owner(request) is not None
        if not mine or not self._branches.begin(request, exact):
            self.exact_only.limit(request.request_id, tokens)

    def _has_branch(self, request: Request) -> bool:
        named = self._opt_in.owner(request) is not None
        return named and self.exact_only.exact_tokens(request.request_id) is None

    def _keep_branch(self, request: Request, exact: int, whole: int) -> None:
        if (owner := self._opt_in.owner(request)) and self._has_branch(request):
            self._branches.keep(request, owner, exact, whole)
            self.copies.keep_here(request.block_hashes[exact:whole])  # the last step's among them


def _computed(request: Request) -> int:
    """Return the number of computed tokens whose blocks are complete."""
    computed: int = min(request.num_computed_tokens, request.num_tokens - 1)
    return computed


def _usage(read: PromptSources, prompt: int) -> dict[str, int]:
    """Return the tokens of a prompt by where they came from."""
    own, computed = read.found - read.exact, prompt - read.found - read.spliced
    return {"exact": read.exact, "own": own, "spliced": read.spliced, "computed": max(0, computed)}
