"""The compiled engine core (core/engine.cpp); built where there is a C++ compiler.

Everything is called with the GIL, from the scheduler's thread, but ``work``, ``holders`` and
``Batch.events``, which the client's thread may call as well.
"""

from collections.abc import Callable, Sequence
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

    def was_reset(self) -> None:
        """Note that the prefix cache was reset."""

    def forget_notes(self) -> None:
        """Forget what was noted and not taken."""

    def take(self, sessions: dict[str, str], needs: dict[str, int], whole: bool, /) -> Batch | None:
        """Take what changed, up to a reset or until now; None: nothing.

        Args:
            sessions: Names of sessions by request id, for the events.
            needs: What is cached of these requests is special.
            whole: All is special.

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

    def forget(self, ids: Sequence[int], /) -> int:
        """Forget victims that were used or moved; returns how many of these were some."""

    def anchor(self, since: float, /) -> Any:
        """The last victim that stands, and that no request gave back after ``since``; else None.

        Those behind it are forgotten.
        """

    def look(self, most: int, /) -> tuple[list[Any], list[bytes], bytes]:
        """The next victims that were not looked at: blocks, hashes, and int64 numbers, packed."""

    def scan(self, behind: Any, count: int, blanks: int, /) -> tuple[list[Any], Any]:
        """The queue's next cached blocks, and the last block that was passed.

        Args:
            behind: Where to begin; None: at the head.
            count: Cached blocks at most.
            blanks: Empty blocks passed over at most.
        """

    def freed(self, ids: Sequence[int], count: int, now: float, /) -> None:
        """Note that a request gives the first ``count`` of these blocks back."""

def pack(hashes: list[bytes], first: int, end: int, /) -> bytes:
    """Keys of a request's hashes ``[first, end)``, packed little-endian."""
