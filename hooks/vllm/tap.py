"""Notes which blocks a pool caches and evicts, as it happens, at the cost of one append each.
vLLM's own KV events carry tokens and extra keys too, and building them costs a decode step of 32
requests more than the rest of our observing. So the pool's methods are wrapped on the instance
instead.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, groupby, starmap
from operator import itemgetter
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ...graph.types import Keys
from ..keys import GROUP_BYTES, key_of, keys_in_table

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class PackedHashes(Sequence[bytes]):
    """Hashes of one length, as in the prefix cache (with a group's id), stored end to end.

    It is a single object: one Python object per hash would have to be created, kept and scanned by
    the garbage collector within an engine's step.
    """

    __slots__ = ("_data", "_width")

    def __init__(self, data: bytes = b"", width: int = 1) -> None:
        self._data = data
        self._width = width

    def __len__(self) -> int:
        return len(self._data) // self._width

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        start = range(len(self))[at] * self._width
        return self._data[start : start + self._width]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def keys(self) -> Keys:
        """The keys of these hashes: uint64 ``[len]``."""
        return keys_in_table(self._table())

    def of_group(self, suffix: bytes) -> PackedHashes:
        table = self._table()
        ending = np.frombuffer(suffix, dtype=np.uint8)
        of_it = (table[:, self._width - len(suffix) :] == ending).all(axis=1)
        return PackedHashes(table[of_it].tobytes(), self._width)

    def _table(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        return np.frombuffer(self._data, dtype=np.uint8).reshape(-1, self._width)


Cached = tuple["Request", Sequence["KVCacheBlock"], int, int]
"""Blocks ``[first, end)`` of a request, among all of its blocks, entered the prefix cache."""
CachedRun = tuple[Sequence[bytes], Sequence["KVCacheBlock"], int, int]
"""As ``Cached``, for later use: hashes in place of the request, which may hold images."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Reader = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@dataclass(slots=True)
class Changes:
    cached: list[Cached] = field(default_factory=list)  # in order
    evicted: PackedHashes = field(default_factory=PackedHashes)  # with their group's id, in order
    then_reset: bool = False  # whether the prefix cache was reset after these changes


class PoolTap:
    """Follows a pool's changes to one KV cache group's prefix cache.

    Args:
        pool: The live block pool. From ``attach`` to ``detach`` five of its methods are shadowed
            on the instance. Each calls vLLM's own with the same arguments, and only then notes what
            happened; arguments that it cannot read make ``take`` raise, outside vLLM's allocation.
        group: The KV cache group whose stores are noted. Evictions are noted for all groups.
    """

    def __init__(self, pool: BlockPool, group: int) -> None:
        # whether the prefix cache was reset since the last ``take``
        self.was_reset = False  # among what was not taken yet
        # returns blocks in use that need not block a reset, each as often as it is held; called
        # before a reset, and its blocks are given back after it
        self.lend: Callable[[], list[KVCacheBlock]] = list
        self.renewed: Callable[[], None] = lambda: None  # called after a reset that took place
        # called after one that vLLM refused: what it was asked for may have happened all the same
        self.refused: Callable[[], None] = lambda: None
        # called after blocks were given back, which may change the next to be taken
        self.freed: Callable[[], None] = lambda: None
        # called with the blocks of a prefix hit after it took those that were free out of the free
        # queue's midst
        self.touched: Callable[[Sequence[KVCacheBlock]], None] = lambda blocks: None
        self._pool = pool
        self._group = group
        self._before: list[Changes] | deque[Changes] = []  # what was followed by a reset
        self._calls: list[_Call] = []  # that cached blocks; one object for good, as is the next
        self._evicted = BytesIO()
        self._width = 0  # bytes of a hash with its group's id; not known yet
        self._unread: Exception | None = None
        self._read: _Reader  # of such a call's arguments; ``attach`` makes it

    def take(self) -> Sequence[Changes]:
        """Return the changes since the last call, in order.

        Raises an error met while noting a change; from then on the notes are incomplete.
        """
        before, self._before = self._before, []
        if self._calls or self._evicted.tell():
            before.append(self._take_latest())
        if self._unread is not None:
            raise self._unread
        self.was_reset = False
        return before

    def attach(self) -> None:
        """Follow the pool from now on; raises TypeError."""
        shadows = (
            self._cache_full_blocks(), self._emit_removed(), self._free(), self._touch(),
            self._reset(),
        )  # fmt: skip
        for name, shadow in zip(_FOLLOWED, shadows, strict=True):
            setattr(self._pool, name, shadow)

    def detach(self, but_resets: bool = False) -> None:
        """Restore the pool's own methods. With ``but_resets``, keep handling resets (``lend``,
        ``renewed``), and note nothing.
        """
        for name in _FOLLOWED[: -1 if but_resets else None]:
            self._pool.__dict__.pop(name, None)
        self.refused = lambda: None
        self._take_latest()
        self._before = deque(maxlen=0)

    def _cache_full_blocks(self) -> Callable[..., Any]:
        original: Callable[..., Any] = self._pool.cache_full_blocks
        self._read, append = _reader(original, _READ), self._calls.append

        @functools.wraps(original)  # whoever looks at its parameters sees vLLM's
        def cache_full_blocks(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            append((args, kwargs))  # read later, all at once: a step of 500 requests makes 31 calls
            return result

        return cache_full_blocks

    def _emit_removed(self) -> Callable[..., Any]:
        original: Callable[..., Any] = self._pool._emit_block_removed_events
        read, append = _reader(original, ("block_hashes",)), self._note_removed()
        if _does_nothing(self._pool, original):
            return append
        return self._followed(original, lambda args, kwargs: append(read(args, kwargs)))

    def _note_removed(self) -> Callable[[Any], Any]:
        return self._evicted.writelines

    def _free(self) -> Callable[..., Any]:
        return self._followed(self._pool.free_blocks, lambda args, kwargs: self.freed())

    def _touch(self) -> Callable[..., Any]:
        original: Callable[..., Any] = self._pool.touch
        read = _reader(original, ("blocks",))
        return self._followed(original, lambda args, kwargs: self.touched(read(args, kwargs)))

    def _followed(
        self, original: Callable[..., Any], note: Callable[[tuple[Any, ...], dict[str, Any]], None]
    ) -> Callable[..., Any]:
        """``original``, and then a note of its arguments; an error of ours waits for ``take``."""

        def followed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                note(args, kwargs)
            except Exception as error:
                self._failed(error)
            return result

        return followed

    def _reset(self) -> Callable[..., Any]:
        original: Callable[..., Any] = self._pool.reset_prefix_cache

        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            lent = self._lent()
            try:
                self._pool.free_blocks(lent)  # in stock vLLM they would be free
                done = original(*args, **kwargs)
            finally:
                self._pool.touch(lent)
            if done:
                self._renewed()
            else:
                self._call(self.refused)
            return done

        return reset_prefix_cache

    def _take_latest(self, then_reset: bool = False) -> Changes:
        cached, evicted = self._take_cached(), self._evicted.getvalue()
        self._evicted.seek(0)
        self._evicted.truncate()
        return Changes(cached, PackedHashes(evicted, self._hash_bytes(cached, evicted)), then_reset)

    def _take_cached(self) -> list[Cached]:
        calls = self._calls[:]
        self._calls.clear()
        if not calls:
            return []
        try:
            return [
                (request, blocks, first, end)
                for request, blocks, first, end, group in starmap(self._read, calls)
                if group == self._group and first < end
            ]
        except Exception as error:
            self._failed(error)
            return []

    def _hash_bytes(self, cached: Sequence[Cached], evicted: bytes) -> int:
        """Of each hash in the prefix cache: all are as long as the first one seen."""
        if not self._width:
            seen = (request.block_hashes[0] + bytes(GROUP_BYTES) for request, *_ in cached)
            held = (block.block_hash for block in self._pool.blocks if block.block_hash)
            self._width = len(next(chain(seen, held), b""))
        return self._width or max(1, len(evicted))

    def _failed(self, error: Exception) -> None:
        """Have the next ``take`` raise an error of ours."""
        self._unread = error

    def _lent(self) -> list[KVCacheBlock]:
        try:
            return self.lend()
        except Exception as error:
            self._failed(error)
            return []

    def _renewed(self) -> None:
        self.was_reset = True
        self._call(lambda: self._before.append(self._take_latest(then_reset=True)))
        self._call(self.renewed)

    def _call(self, told: Callable[[], None]) -> None:
        try:
            told()
        except Exception as error:
            self._failed(error)


def _does_nothing(pool: BlockPool, emit: Callable[..., Any]) -> bool:
    """Whether ``emit`` only reports evictions, and to no listener, so that a built-in method can
    take its place.

    It is called for every evicted block: a call of Python's for each costs a step of 16k tokens
    300 µs.
    """
    plain = list(inspect.signature(emit).parameters) == ["block_hashes"]
    own = getattr(emit, "__func__", None) is type(pool)._emit_block_removed_events
    silent = not getattr(pool, "enable_kv_cache_events", True)
    return plain and own and silent and _is_called_by_place(type(pool), emit.__name__)


def _is_called_by_place(kind: type, name: str) -> bool:
    """Whether all calls in a class's source pass one argument by place, like ``writelines``."""
    try:
        calls = re.findall(rf"self\.{name}\((.*)", inspect.getsource(kind))
    except OSError:
        return False
    return bool(calls) and all(re.fullmatch(r"\w+\)", given) for given in calls)


def _reader(function: Callable[..., Any], names: Sequence[str]) -> _Reader:
    """Finds the arguments ``names`` of a call however passed: a tuple, or a single value."""
    places = {name: at for at, name in enumerate(inspect.signature(function).parameters)}
    if missing := [name for name in names if name not in places]:
        raise TypeError(f"{function.__qualname__} has no {', '.join(missing)}")
    wanted = [(places[name], name) for name in names]
    last, by_place = max(places[name] for name in names), itemgetter(*(at for at, _ in wanted))
    by_name = itemgetter(*names)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            return by_name(kwargs)
        given = len(args)
        if given > last:
            return by_place(args)
        return tuple([args[at] if at < given else kwargs[name] for at, name in wanted])

    return read


_FOLLOWED = (
    "cache_full_blocks", "_emit_block_removed_events", "free_blocks", "touch", "reset_prefix_cache"
)  # fmt: skip
_READ = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "kv_cache_group_id")


def returned(
    cached: Sequence[CachedRun], evicted: Sequence[int], gone: Sequence[int], scale: int
) -> list[CachedRun]:
    """Return the runs of evicted blocks that are still cached, as the step last ``cached`` them, in
    order. ``evicted`` and ``gone`` are keys; ``scale`` request hashes make a block.
    """
    if len(gone) == len(evicted):
        return []
    back, runs = set(evicted).difference(gone), list[CachedRun]()
    for each in reversed(cached):
        if not back:
            break
        runs += _runs(each, back, scale)
    return runs


def _runs(cached: CachedRun, back: set[int], scale: int) -> Iterator[CachedRun]:
    """Runs of blocks whose keys are among ``back``, which loses them."""
    hashes, blocks, first, end = cached
    keys = map(key_of, hashes[scale * (first + 1) - 1 : scale * end : scale])
    for is_back, run in groupby(enumerate(keys, first), key=lambda each: each[1] in back):
        if is_back:
            places = dict(run)
            back.difference_update(places.values())
            yield hashes, blocks, min(places), max(places) + 1
