"""One layer of the cache: its tokens, their scores, and how it shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .settings import ConfKVSettings, UnsupportedError
from .stores import FloatStore, MixedStore, room_for


class Ranker(Protocol):
    """Ranks the tokens of a layer by one float32 per token, which moves with the token; tokens with
    the lowest scores are evicted first. ``queries``, at least 1: from how many of a prompt's last
    queries it needs the attention.
    """

    @property
    def queries(self) -> int: ...

    def first(self, mass: Tensor) -> Tensor:
        """Return the number to remember for each token of a prompt, float32 [batch, tokens].

        ``mass``, float32 [batch, queries, tokens], is the attention of the prompt's last queries,
        averaged over heads; each query's row sums to 1.
        """

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        """Return the number to remember for each token after one more step.

        ``memory`` are the numbers remembered before the step; ``mass`` is the step's attention to
        each token, averaged over heads; all float32 [batch, tokens].
        """

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        """Return the tokens' scores, [batch, tokens], from ``memory``, float32, their ``position``
        in the text, int64, and ``open_to``, bool: whether they may be evicted (otherwise the score
        is ignored).
        """


@dataclass(frozen=True, slots=True)
class AttentionAndRecency:
    """α · moving average of attention + (1 − α) · recency, each scaled to 0 … 1 in the layer."""

    alpha: float  # weight of attention against recency, 0 … 1
    gamma: float  # share of the moving average kept at each step, 0 … 1
    queries: int = 64  # last queries of the prompt that initialise the average

    def first(self, mass: Tensor) -> Tensor:
        return mean_of_queries(mass)

    def next(self, memory: Tensor, mass: Tensor) -> Tensor:
        return memory.lerp(mass, 1.0 - self.gamma)

    def scores(self, memory: Tensor, position: Tensor, open_to: Tensor) -> Tensor:
        attention = scaled(memory, open_to)
        recency = scaled(position.to(memory.dtype), open_to)
        return self.alpha * attention + (1.0 - self.alpha) * recency


def mean_of_queries(mass: Tensor) -> Tensor:
    """Return the mean over the queries of [batch, queries, tokens], ignoring padding in front."""
    present = (mass.sum(2) > 0.0).sum(1, keepdim=True).clamp_min(1)
    return mass.sum(1) / present


def scaled(values: Tensor, among: Tensor) -> Tensor:
    """Return ``values`` [batch, tokens] scaled to 0 … 1 between the extremes of those in
    ``among``.
    """
    least = torch.where(among, values, torch.inf).amin(1, keepdim=True)
    most = torch.where(among, values, -torch.inf).amax(1, keepdim=True)
    return (values - least) / (most - least).clamp_min(torch.finfo(values.dtype).tiny)


EMPTY = -1  # position of a slot without a token: padding, or a row with fewer tokens


class TokenTable:
    """Columns over the slots of a store, [batch, held], in text order."""

    def __init__(self, batch: int, device: torch.device, most: int = 0) -> None:
        self._most = most  # slots, unless a prompt brings more
        self._places = torch.empty((batch, 0), dtype=torch.int64, device=device)
        # What the ranker remembers of each token.
        self.memory = torch.empty((batch, 0), dtype=torch.float32, device=device)
        self.held = 0  # slots in use
        self.seen = 0  # tokens of the text so far
        self.valid = [0] * batch  # tokens of each row

    @property
    def position(self) -> Tensor:
        """int64: each token's position in the text, counting padding; ``EMPTY`` for empty slots."""
        return self._places[:, : self.held]

    @property
    def full(self) -> bool:
        return min(self.valid) == self.held

    def append(self, count: int, present: Tensor | None) -> None:
        """Add ``count`` slots; ``present`` [batch, count] marks those with a token; None: all."""
        begin, end = self.held, self.held + count
        if end > (room := self._places.shape[1]):
            more = room_for(end, self._most) - room
            self._places = torch.nn.functional.pad(self._places, (0, more))
        device = self._places.device
        self._places[:, begin:end] = torch.arange(self.seen, self.seen + count, device=device)
        if present is not None:
            self._places[:, begin:end].masked_fill_(~present, EMPTY)
        self.memory = torch.nn.functional.pad(self.memory, (0, count))
        self.held = end
        self.seen += count
        self._count(count if present is None else present.sum(1).tolist())

    def keep(self, slots: Tensor, emptied: Tensor) -> None:
        """Keep only ``slots`` [batch, n], and mark those in ``emptied`` as empty."""
        position = self.position.gather(1, slots).masked_fill(emptied, EMPTY)
        self.held = slots.shape[1]
        if self._places.shape[1] > (room := room_for(self.held, self._most)):
            self._places = self._places.new_empty((len(position), room))
        self._places[:, : self.held] = position
        self.memory = self.memory.gather(1, slots).masked_fill(emptied, 0.0)
        self.valid = (self.position != EMPTY).sum(1).tolist()

    def select(self, rows: Tensor) -> None:
        self._places, self.memory = self._places[rows], self.memory[rows]
        self.valid = [self.valid[row] for row in rows.tolist()]

    def _count(self, more: int | list[int]) -> None:
        added = [more] * len(self.valid) if isinstance(more, int) else more
        self.valid = [now + new for now, new in zip(self.valid, added, strict=True)]


class Survivors(NamedTuple):
    """Slots to keep, [batch, n], in text order."""

    slots: Tensor  # int64; the last of each row are the protected ones
    emptied: Tensor  # bool; a row that keeps fewer tokens has empty slots in front


def survivors(
    table: TokenTable, budgets: Sequence[int], protected: int, ranker: Ranker
) -> Survivors | None:
    """Return the slots to keep; None if no row exceeds its budget."""
    over = [held > allowed for held, allowed in zip(table.valid, budgets, strict=True)]
    if not any(over):
        return None
    protected = min(protected, table.held)
    old = table.held - protected
    position = table.position[:, :old]
    open_to = position != EMPTY
    wanted = _wanted(open_to.sum(1), over, budgets, protected)
    score = ranker.scores(table.memory[:, :old], position, open_to)
    score = score.masked_fill(~open_to, -torch.inf)
    chosen = score.argsort(dim=1, descending=True, stable=True)[:, : int(wanted.max())]
    return _in_order(chosen, position, wanted, old, protected)


def _wanted(have: Tensor, over: list[bool], budgets: Sequence[int], protected: int) -> Tensor:
    """How many of its evictable tokens each row keeps."""
    allowed = torch.tensor([budget - protected for budget in budgets], device=have.device)
    exceeds = torch.tensor(over, device=have.device)
    return torch.where(exceeds, torch.minimum(allowed.clamp_min(0), have), have)


def _in_order(
    chosen: Tensor, position: Tensor, wanted: Tensor, old: int, protected: int
) -> Survivors:
    """The chosen slots by position, surplus ones of a row in front, then the newest."""
    batch, count = chosen.shape
    surplus = torch.arange(count, device=chosen.device) >= wanted[:, None]
    place = position.gather(1, chosen).masked_fill(surplus, EMPTY)
    place, order = place.sort(dim=1, stable=True)
    newest = torch.arange(old, old + protected, device=chosen.device).expand(batch, -1)
    slots = torch.cat([chosen.gather(1, order), newest], 1)
    emptied = torch.nn.functional.pad(place == EMPTY, (0, protected))
    return Survivors(slots, emptied)


class ConfLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's tokens, read by the attention function, which reports each token's attention."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, settings: ConfKVSettings, share: float, ranker: Ranker) -> None:
        super().__init__()
        self._settings, self._share, self._ranker = settings, share, ranker
        self.exact = True  # attention still reads, bit for bit, what a plain cache would hold
        self.observed = ranker.queries  # how many of a prompt's last queries `note` needs
        self.fresh = 0  # tokens of this call that attention has not seen yet

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate an empty store for keys and values of this type and shape."""
        it = self._settings
        most = self.budget(it.high) + it.slack + 1  # more only while a longer prompt is read
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store: FloatStore | MixedStore = (
            MixedStore(key_states, value_states, most, it.window, it.slack)
            if it.int8
            else FloatStore(key_states, value_states, most)
        )
        self.table = TokenTable(key_states.shape[0], key_states.device, most)
        self._lowest = self._for_all_rows(it.high)
        self._steps = 0  # since the last prompt
        self.is_initialized = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes change with each eviction
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens, and return what attention reads while nothing is evicted from this
        layer. Raises UnsupportedError.
        """
        self._refuse(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.table.seen == 0
        self.fresh = key_states.shape[2]
        self.store.append(key_states, value_states)
        if isinstance(self.store, FloatStore):
            keys, values = self.store.keys, self.store.values
        else:
            keys, values = key_states.view_as(key_states), value_states
            self.exact = self.exact and first
        keys.kvgraph_layer = self
        return keys, values

    def arrived(self, present: Tensor | None) -> None:
        """Add new tokens to the table; ``present`` [batch, fresh]: which are no padding."""
        self.table.append(self.fresh, present)
        self.fresh = 0

    def visible(self, count: int) -> Tensor | None:
        """Return what each of ``count`` newest tokens may read, [batch, count, held]; None: all."""
        if count == 1:
            return None if self.table.full else (self.table.position != EMPTY)[:, None, :]
        slot = torch.arange(self.table.held, device=self.device)
        causal = slot <= torch.arange(count, device=self.device)[:, None] + self.table.held - count
        return causal[None] & (self.table.position != EMPTY)[:, None, :]

    def note(self, mass: Tensor, fresh: int) -> None:
        """Record attention [batch, queries, held], and cut rows that exceed the high budget."""
        self._steps += 1
        if fresh > 1:  # a prompt: what was decided before it does not count
            self._steps, self._lowest = 0, self._for_all_rows(self._settings.high)
        mass = mass.float()  # autocast may have made it another type
        memory, old = self.table.memory, self.table.held - fresh
        if fresh == 1:
            self.table.memory = self._ranker.next(memory, mass[:, -1])
        else:
            before = self._ranker.next(memory[:, :old], mean_of_queries(mass)[:, :old])
            self.table.memory = torch.cat([before, self._ranker.first(mass)[:, old:]], 1)
        if max(self.table.valid) > self.budget(self._settings.high) + self._settings.slack:
            self._cut(self._for_all_rows(self._settings.high))

    def shrink(self, budgets: Sequence[int]) -> None:
        """Evict tokens that exceed ``budgets`` (for a layer of average depth), once every ``slack``
        steps. Each row is cut to the lowest of its budgets since the last eviction.
        """
        # All rows are cut in the same step: moving one row's tokens moves those of all.
        self._lowest = [min(pair) for pair in zip(self._lowest, budgets, strict=True)]
        if self._steps % self._settings.slack:
            return  # most steps end here
        self._cut(self._lowest)
        self._lowest = self._for_all_rows(self._settings.high)

    def _for_all_rows(self, mean: int) -> list[int]:
        return [mean] * len(self.table.valid)

    def _cut(self, budgets: Sequence[int]) -> None:
        protected = self._settings.window
        if isinstance(self.store, MixedStore):
            protected = max(protected, self.store.recent)
        allowed = [self.budget(each) for each in budgets]
        chosen = survivors(self.table, allowed, protected, self._ranker)
        if chosen is None:
            return
        self.store.keep(chosen.slots)
        self.table.keep(*chosen)
        self.exact = False

    def budget(self, mean: int) -> int:
        return max(self._settings.window + self._settings.slack, round(mean * self._share))

    def get_seq_length(self) -> int:
        """Return the tokens of the text so far; evicted ones count, because positions continue."""
        return self.table.seen if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the slots including new ones, and the tokens of the text before the first slot."""
        held = self.table.held if self.is_initialized else 0
        return held + query_length, self.get_seq_length() - held

    def get_max_length(self) -> int:
        return -1  # the text has no limit

    def reset(self) -> None:
        self.is_initialized, self.exact, self.fresh = False, True, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take over the rows with which beam search continues."""
        if self.is_initialized:
            self.store.select(beam_idx.to(self.device))
            self.table.select(beam_idx.to(self.device))
            self._lowest = [self._lowest[row] for row in beam_idx.tolist()]

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.reorder_cache(torch.arange(len(self.table.valid))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            rows = torch.arange(len(self.table.valid)).repeat_interleave(repeats)
            self.reorder_cache(rows)

    def crop(self, tokens_to_remove: int) -> None:
        # What was evicted does not come back.
        raise UnsupportedError("ConfKVCache cannot be cropped: no assisted generation with it")

    def _refuse(self, key_states: Tensor) -> None:
        if key_states.requires_grad:
            raise UnsupportedError("ConfKVCache is for inference: use torch.no_grad()")
        if self.fresh:
            raise UnsupportedError(
                "the model's attention did not ask ConfKVCache: make it with the model's own "
                "configuration object, ConfKVCache(model.config), and after any call of "
                "set_attn_implementation. A model whose attention makes other keys of what its "
                "cache holds is not served"
            )
