"""``SpanRecall``: what a request's prompt says again comes back at its new position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ...recall.cover import SpliceLimits
from ...recall.said_blocks import Domain
from ...recall.span_index import Piece, SpanIndex
from ...tiers.ledger import TierLedger
from ..settings import RECALL_SHARED_VARIABLE
from ..transfers.loader import Loader
from ..transfers.no_tiers import NoRecall
from .exact_only import ExactOnly
from .opt_in import OptIn
from .own_branch import OwnBranches
from .own_text import OwnText, Read
from .piece_runs import splice_of
from .splice_plans import SplicePlans, last_of, tokens_of
from .wanted_copies import WantedCopies

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..observe.group import ObservedGroup
    from ..pool.tap import Cached

NOBODYS: Final = (
    "it says not whose text it is: name its session or tenant, or send a cache salt "
    f"(or have the operator set {RECALL_SHARED_VARIABLE}=1)"
)


class SpanRecall(NoRecall):
    """Covers the front of opted-in prompts: exact prefix, exact copies, then spans of other copies.

    Args:
        group: The observed KV cache group.
        ledger: Where copies are recorded.
        loader: Begins loads.
        index: What blocks of opted-in requests say.
        limits: What the model's calibration allows.
        opt_in: Who asked for it.
        exact_only: Keeps what is approximate out of the prefix cache.

    Attributes:
        exact: Of approximate requests under way, how many tokens are exact.
        exact_only: As given.
        copies: Of what opted-in requests left.
    """

    def __init__(
        self,
        group: ObservedGroup,
        ledger: TierLedger,
        loader: Loader,
        index: SpanIndex,
        limits: SpliceLimits,
        opt_in: OptIn,
        exact_only: ExactOnly,
    ) -> None:
        self._group, self._ledger, self._loader = group, ledger, loader
        self._index, self._plans = index, SplicePlans(group, ledger, index, limits)
        self._opt_in, self.exact_only = opt_in, exact_only
        self._running: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}
        self._branches = OwnBranches(group.block_size)
        self._own = OwnText(index, group.block_size, opt_in, limits.most_generations)
        self._tried: set[str] = set()  # spliced once: if that failed, it would fail again
        self.exact: dict[str, int] = {}
        self.copies = WantedCopies(ledger)

    def request_queued(self, request: Request) -> None:
        """Let a session's request find what its last one left, before anything is looked up."""
        owner = self._opt_in.owner(request)
        if owner is not None and request.request_id not in self.exact:
            exact = self._branches.follow(request, owner)
            if exact is not None:
                self.exact[request.request_id] = exact * self._group.block_size

    def looked_up(
        self, request: Request, first: int, answer: tuple[int | None, bool]
    ) -> tuple[int | None, bool]:
        """Return what a load can bring, with what can be spliced behind what is exact.

        Args:
            first: Blocks that the pool holds.
            answer: What the exact lookup says of the rest.
        """
        exact, _ = answer
        domain = self._opt_in.domain(request)
        if exact is None or domain is None:
            return answer

        def domains() -> Sequence[Domain]:
            tried = request.request_id in self._tried
            return () if tried else self._own.domains(request, domain)

        plan = self._plans.plan(request, domains, first, exact)
        return (exact + plan.spliced, True) if plan.pieces else answer

    def spliced(self, request: Request, to_load: int) -> int:
        """How many of the tokens that vLLM expects from a request's load are spliced."""
        return self._plans.spliced(request.request_id, to_load)

    def request_scheduled(self, request: Request, ids: Sequence[int], to_load: int) -> bool:
        """Note that a request was given its blocks; whether its load is begun here.

        Args:
            ids: Its blocks.
            to_load: Tokens that vLLM expects from the load.
        """
        if self._opt_in.domain(request) is None:
            return False
        self._running[request.request_id] = self._prefilling[request.request_id] = request
        spliced, size = self.spliced(request, to_load), self._group.block_size
        plan = self._plans.take(request.request_id)
        if plan is None:  # nothing is looked up for who has blocks already, as after a load
            self._note_read(request, request.num_computed_tokens)
            return False
        whole = plan.first + plan.loaded
        self._note_read(request, whole * size, plan.pieces if spliced else ())
        if not spliced:
            return False
        self._set_apart(request, whole)
        self._tried.add(request.request_id)
        hashes = self._group.hashes(request, whole * size)[plan.first :]
        splice = splice_of(plan.pieces, ids, size, self._ledger.directory)
        self._loader.begin(request.request_id, hashes, ids[plan.first : whole], splice)
        return True

    def request_finished(self, request_id: str) -> dict[str, Any] | None:
        """Keep what an ended request's exact blocks say; returns its usage, if it opted in."""
        request, read = self._running.pop(request_id, None), self._own.read(request_id)
        refused = self._opt_in.is_nobodys(request_id)
        if request is not None:
            self._keep(request)
        self._plans.take(request_id)
        self._prefilling.pop(request_id, None)
        self._opt_in.forget(request_id)
        self._own.forget(request_id)
        self.exact_only.forget(request_id)
        self.exact.pop(request_id, None)
        self._tried.discard(request_id)
        if refused:
            return {"kvgraph": {"recall": {"refused": NOBODYS}}}
        if request is None or read is None:
            return None
        return {"kvgraph": {"recall": _usage(read, request.num_prompt_tokens)}}

    def cached(self, runs: Sequence[Cached]) -> None:
        """Note what requests registered: approximate blocks never reach the disk, whenever their
        request loses them."""
        for request, _, first, end in runs if self.exact else ():
            exact = self.exact.get(request.request_id)
            if exact is not None:
                size = self._group.block_size
                hashes = self._group.hashes(request, end * size)
                self.copies.keep_here(hashes[max(first, exact // size) :])

    def take_due(self) -> list[bytes]:
        """Take hashes of blocks that are to be copied now, while they are sure to be there."""
        for request in list(self._prefilling.values()):
            if request.num_computed_tokens >= request.num_prompt_tokens:
                # Its request holds it: at the turn's end, others may take the blocks at once.
                del self._prefilling[request.request_id]
                self.copies.add(self._kept_blocks(request))
        return self.copies.take()

    @property
    def busy(self) -> bool:
        """See ``WantedCopies.due``."""
        return self.copies.due

    def clear(self) -> None:
        """Forget all text: the bytes that said it no longer count."""
        self._index.clear()
        self._branches.clear()
        self.copies.clear()
        self._plans.clear()

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
        """Hashes of the computed blocks that are spliced later: exact ones, and a session's own."""
        size, computed = self._group.block_size, _computed(request)
        exact = self.exact.get(request.request_id, computed)
        own = self._own.enters and self._has_branch(request)
        kept = computed if own else min(computed, exact)
        return self._group.hashes(request, kept // size * size)

    def _set_apart(self, request: Request, exact: int) -> None:
        """Keep blocks from ``exact`` on from all others: for the session alone, or for nobody.

        They have names of their own also where the request went on from its session's last branch:
        that one's blocks were computed, and hold something else.
        """
        tokens = exact * self._group.block_size
        self.exact[request.request_id] = min(tokens, self.exact.get(request.request_id, tokens))
        mine = self._opt_in.owner(request) is not None
        if not mine or not self._branches.begin(request, exact):
            self.exact_only.limit(request.request_id, tokens)

    def _has_branch(self, request: Request) -> bool:
        """Whether an approximate request's blocks are found by its session."""
        named = self._opt_in.owner(request) is not None
        return named and self.exact_only.exact_tokens(request.request_id) is None

    def _keep_branch(self, request: Request, exact: int, whole: int) -> None:
        if (owner := self._opt_in.owner(request)) and self._has_branch(request):
            self._branches.keep(request, owner, exact, whole)
            self.copies.keep_here(request.block_hashes[exact:whole])  # the last step's among them


def _computed(request: Request) -> int:
    """How many of its tokens are computed; the last one's blocks may not be."""
    computed: int = min(request.num_computed_tokens, request.num_tokens - 1)
    return computed


def _usage(read: Read, prompt: int) -> dict[str, int]:
    """Tokens of a prompt, by where they came from."""
    own, computed = read.found - read.exact, prompt - read.found - read.spliced
    return {
        "exact": read.exact, "own": own, "spliced": read.spliced, "computed": max(0, computed)
    }  # fmt: skip
