"""The compiled engine core (core/engine/engine.cpp); built where there is a C++ compiler.

Everything is called with the GIL, from the scheduler's thread, but ``work``, ``holders`` and
``Batch.events``, which the client's thread may call as well.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Keys = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]

class Batch:
    """What a step cached and evicted, until it is told; stands in an outbox as a ``Later``."""

    @property
    def evicted(self) -> int:
        """Blocks that were evicted."""

    @property
    def stored(self) -> int:
        """Blocks that were cached."""

    @property
    def then_reset(self) -> bool:
        """Whether the prefix cache was reset after that."""

    @property
    def is_special(self) -> bool:
        """Whether somebody in the step itself must see what was cached."""

    @property
    def evicted_hashes(self) -> bytes:
        """The evicted blocks' hashes with their group's id, end to end, if they are kept."""

    def cached(self) -> list[tuple[Any, Sequence[Any], int, int]]:
        """Blocks ``[first, end)`` of requests, if ``is_special``; once."""

    def events(self) -> list[Any]:
        """What is told of the changes; they are in the index from then on."""

class Core:
    """Follows one block pool with one KV cache group of full attention.

    Args:
        pool: The live block pool.
        group: The KV cache group whose stores are noted.
        freed_at: float64 ``[blocks]``, seconds; shared with the caller.
        places: Of ``request``, ``blocks``, ``num_cached_blocks``, ``num_full_blocks`` and
            ``kv_cache_group_id`` among the parameters of ``pool.cache_full_blocks``.
        stored, removed, cleared: Classes of events.
        block_size: Tokens of a block.
        catch_up: Notes all that changed, in order; called before events are made.

    Raises:
        TypeError: Pool, queue or blocks are not as we know them.
    """

    looked: int
    """How many victims, from the front, were looked at."""

    def __init__(
        self,
        pool: Any,
        group: int,
        freed_at: npt.NDArray[np.float64],
        places: tuple[int, int, int, int, int],
        stored: type,
        removed: type,
        cleared: type,
        block_size: int,
        catch_up: Callable[[], object],
        /,
    ) -> None: ...
    @property
    def known(self) -> int:
        """Keys in the index."""

    @property
    def behind(self) -> int:
        """Steps whose changes are not in the index yet."""

    @property
    def victims(self) -> int:
        """Victims that stand at the queue's head, or stood there."""

    @property
    def last(self) -> Any:
        """The last of them, if it stands; else None."""

    @property
    def place(self) -> int:
        """Of the next victim, in the ranking's order."""

    def cache_full_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the pool's method: call it, and note what it cached."""

    def removed(self, hashes: list[bytes], /) -> None:
        """Note that blocks with these hashes were evicted."""

    def keep_hashes(self) -> None:
        """Keep the hashes of what is evicted, from now on."""

    def evicts(self, *keys: set[int]) -> bool:
        """Whether any block that was evicted, and is not taken yet, holds one of these keys."""

    def was_reset(self) -> None:
        """Note that the prefix cache was reset."""

    def forget_notes(self) -> None:
        """Forget what was noted and not taken."""

    def take(self, sessions: dict[str, str], whole: bool, /) -> Batch | None:
        """Take what changed, up to a reset or until now; None: nothing.

        Args:
            sessions: Names of sessions by request id, for the events.
            whole: All is special; else, what a LoRA adapter computed.

        Raises:
            RuntimeError: The pool was given what cannot be read.
        """

    def work(self, wait: bool, /) -> bytes | None:
        """Note all that changed; returns the keys that are gone, packed.

        Args:
            wait: Also while another thread is at it, and without the GIL.
        """

    def note(self, keys: _Keys, ids: _Places, /) -> None:
        """Note that blocks hold these keys, of which nobody is told."""

    def forget_keys(self, keys: _Keys, /) -> bytes:
        """Note that a block of each key was evicted; returns those that are gone, packed."""

    def clear(self) -> None:
        """Forget the index."""

    def find(self, key: int, /) -> int:
        """Number of the block that holds a key, or held it last; 0: none is known."""

    def holders(self, keys: _Keys, out: _Places, /) -> None:
        """Write the numbers of blocks that hold ``keys``; 0 for none, or where a key comes again.

        Gives the GIL back meanwhile.
        """

    def follow(self, keys: _Keys | None, ids: _Places | None, /) -> None:
        """Lay this ranking's victims from now on, whose blocks were found."""

    def keep(self, keys: _Keys, /) -> None:
        """Lay no block that holds one of these keys, from now on."""

    def lay(self, place: Any, count: int, most: int, since: float, /) -> int:
        """Move the ranking's next victims to behind ``place``; returns how many keys that took.

        Args:
            count: Victims at most.
            most: Keys to look at, at most; those of victims that stand already do not count.
            since: Blocks that a request gave back later are left alone.
        """

    def drop_taken(self) -> int:
        """Forget the victims at the front that are gone; returns how many are left."""

    def keep_first(self, most: int, /) -> None:
        """Forget all victims but the first; ``most`` may count from the end."""

    def add(self, ids: list[int], hashes: list[bytes], /) -> None:
        """Follow blocks that somebody laid behind the last victim, and their hashes then."""

    def forget(self, ids: Sequence[int], /) -> int:
        """Forget victims that were used or moved; returns how many of these were some."""

    def anchor(self, since: float, /) -> Any:
        """The last victim that stands, and that no request gave back after ``since``; else None.

        Those behind it are forgotten.
        """

    def look(self, most: int, /) -> tuple[list[Any], list[bytes], bytes]:
        """The next victims that were not looked at: blocks, hashes, and int64 numbers, packed."""

    def scan(
        self, behind: Any, count: int, blanks: int, /
    ) -> tuple[list[Any], list[bytes], bytes, Any]:
        """The queue's next cached blocks, as ``look``, and the last block that was passed.

        Args:
            behind: Where to begin; None: at the head.
            count: Cached blocks at most.
            blanks: Empty blocks passed over at most.
        """

    def head(self, count: int, /) -> tuple[list[Any], list[bytes | None]]:
        """What stands at the queue's head, and the hash that each block has, or None."""

    def freed(self, ids: Sequence[int], count: int, now: float, /) -> None:
        """Note that a request gives the first ``count`` of these blocks back."""

    # Steps --------------------------------------------------------------------------------------

    stored: int
    """Blocks that entered the prefix cache and were taken, since the start."""
    tell_at: int
    """How many of them are pressing news."""
    taken: int
    """Blocks that the last step evicted."""
    prompts: int
    """Blocks that looked-up prompts still need."""
    loaded: int
    """Blocks of them that loads can fill."""
    reach: int
    """The most blocks that the next step can take."""
    reach_of_prompts: int
    """Of them, those of prompts."""
    largest_step: float
    """Blocks that the largest step of late evicted; fades."""
    tokens_per_s: float
    """In steps that do not only decode; 0 before the first sample."""
    rested_at: float
    """When the last step was taken in which nobody had to be held."""

    def pace(
        self, clock: Callable[[], float], running: dict[str, Any], sessions: dict[str, str],
        emit: Callable[[Any], None], mailbox: Any, max_stale_s: float, behind: int, least: int,
        share: float, longest_s: float, groups_take: int, /,
    ) -> None:  # fmt: skip
        """Say what a step reads.

        Args:
            clock: Monotonic seconds.
            running: Requests that run, by their ids, the newest last.
            sessions: As in ``take``.
            emit: Takes each batch that nobody else need see.
            mailbox: Holds advice: its attributes ``_ranking`` and ``_admission``.
            max_stale_s: How long a ranking is acted on.
            behind, least, share, longest_s: As in ``PrefillMeter``.
            groups_take: As in ``PromptDemand``.
        """

    def step(self, tokens: int, fetched: int, taken: int, /) -> int:
        """Take a step; returns what is due beyond that, and 0 if nothing is.

        Args:
            tokens: That it computes.
            fetched: Blocks that loads for nobody take in the next one, at most.
            taken: Blocks that it evicted, as far as ``take`` told of them already.

        Meters it, queues what changed, and sees whether the queue can stay as it is. Bits: 1: take
        what changed, and note the step's size; 2: news is pressing; 4: note changes in the index;
        8: arrange the queue, unless it rests after all; 16: ask ``holding``.
        """

    def rest_on(self, ranking: Any, far_blank: Any, is_settled: bool, guards: bool, /) -> None:
        """Say by which ranking the queue is arranged: while that is the latest, nothing is due.

        Args:
            far_blank: While this block is blank, steps take blanks only; None: they take victims.
            is_settled: Whether all victims that were due are laid.
            guards: Whether protected blocks may stand behind the victims.
        """

    def disturb(self) -> None:
        """Have the queue arranged in the next step."""

    def watch_holding(self, holding: Any, /) -> None:
        """Ask this object's ``rests`` in each step."""

    def wait_for_take(self) -> None:
        """From now on leave all that changes to ``take``: something failed."""

    def sized(self, reach: int, most: int, apart: int, largest: float, fade: float, /) -> None:
        """Say how many blocks steps take: see ``Window``."""

    def look_ahead(self, steps: int, most: int, least: int, /) -> None:
        """Say for how many steps victims are laid beforehand, and how many at most and at least."""

    def expect(self, decoding: int, prompts: int, loads: int, /) -> bool:
        """As ``Window.expect``."""

    def step_ended(self, evicted: int, /) -> None:
        """As ``Window.step_ended``."""

    def looked_up(self, request_id: str, needs: int, has: int, loads: int, /) -> None:
        """Note a prompt of which a step may take ``needs - has`` blocks, and a load ``loads``."""

    def finished(self, request_id: str, /) -> None:
        """Forget it: it takes no more."""

class Copy:
    """One block's copy; as in ``hooks.tiers.directory``."""

    id: int
    block_hash: bytes
    era: int
    may_demote: bool
    pins: int

class Copies:
    """Copies in memory that are found; as the reference in ``hooks.tiers.directory``, but that of
    two hashes with one key only the first has a copy.

    The client's thread may call what changes nothing.

    Args:
        plain: Order by least recent use alone.
    """

    def __init__(self, plain: bool, /) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, block_hash: bytes, /) -> bool: ...
    def find(self, block_hash: bytes, /) -> Copy | None:
        """A block's copy."""

    def find_all(self, hashes: Iterable[bytes], /) -> list[Copy | None]:
        """``find`` of each."""

    def pinned(self, hashes: Sequence[bytes], /) -> list[Copy | None]:
        """The same, pinned."""

    def run(self, hashes: Sequence[bytes], /) -> int:
        """How many, from the first on without a gap, have copies."""

    def hashes_of(self, keys: Sequence[int], /) -> list[bytes | None]:
        """Hashes of those that have copies."""

    def order(self) -> list[bytes]:
        """All hashes, the first to go first."""

    def holds_twice(self) -> bool:
        """Whether any block is in use."""

    def stands_twice(self, block_hash: bytes, /) -> bool:
        """Whether this one is."""

    def used(self, hashes: Sequence[bytes], /) -> None:
        """Note that a chain is in use."""

    def all_leave(self, hashes: Iterable[bytes], /) -> None:
        """Note that blocks are not."""

    def all_leave_pool(self, full_hashes: Sequence[bytes], /) -> None:
        """The same, by hashes with a group's id."""

    def lacking(
        self, full_hashes: Sequence[bytes], ids: _Places, marks: Any, under_way: dict[int, Any],
        first: int, /,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Places and keys of blocks about to leave that are worth a copy and have none."""

    def make(
        self, hashes: Sequence[bytes], first: int, era: int, may_demote: Sequence[bool], /
    ) -> list[Copy]:
        """Begin copies."""

    def complete(self, copies: Sequence[Copy], era: int, /) -> tuple[list[bytes], list[Copy]]:
        """Have them found; returns hashes of those that are, and those that are not."""

    def victims(self, count: int, advised: Iterable[bytes], /) -> list[Copy]:
        """Those that go next."""

    def drop(self, copies: Sequence[Copy], /) -> tuple[list[bytes], list[int]]:
        """Have them found no more; returns their hashes, and numbers of those that are not pinned.

        Raises:
            KeyError: One is not found; then none is dropped.
        """

    def unpin(self, copies: Iterable[Copy], /) -> list[int]:
        """Unpin them; returns numbers of those that are neither pinned nor found any more."""

def pack(hashes: list[bytes], first: int, end: int, /) -> bytes:
    """Keys of a request's hashes ``[first, end)``, packed little-endian."""

def keys(hashes: list[bytes], behind: int, /) -> list[int]:
    """Keys of hashes, behind each of which ``behind`` bytes say something else."""
