"""One layer of the cache: its tokens, what is known of them, and how it shrinks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .conf_settings import ConfKVSettings
from .errors import UnsupportedError
from .slots.mixed_store import MixedStore
from .slots.stores import FloatStore
from .slots.token_table import NOBODY, TokenTable
from .survivors import survivors
from .token_ranker import Ranker, mean_of_queries


class ConfLayer(CacheLayerMixin):  # type: ignore[misc]
    """Holds a layer's tokens; the attention function asks it what to read, and tells it the mass.

    Attributes:
        exact: Whether attention still reads, bit for bit, what a plain cache would hold.
        observed: Of a prompt, so many of the last queries are heard of.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, settings: ConfKVSettings, share: float, ranker: Ranker) -> None:
        super().__init__()
        self._settings, self._share, self._ranker = settings, share, ranker
        self.exact = True
        self.observed = ranker.queries
        self.fresh = 0  # tokens of this call that attention has not seen yet

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin without a token."""
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
        """Store new tokens; returns what attention reads while this layer is exact.

        Raises:
            UnsupportedError: The model is trained, or its attention is not ours.
        """
        self._refuse(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.table.seen == 0
        self.fresh = key_states.shape[2]
        self.store.append(key_states, value_states)
        whole = isinstance(self.store, FloatStore)
        keys, values = key_states.view_as(key_states), value_states
        if isinstance(self.store, FloatStore):
            keys, values = self.store.keys, self.store.values
        self.exact = self.exact and (first or whole)
        keys.kvgraph_layer = self
        return keys, values

    def arrived(self, present: Tensor | None) -> None:
        """Enter the new tokens; ``present`` [batch, fresh] says which are no padding."""
        self.table.append(self.fresh, present)
        self.fresh = 0

    def visible(self, count: int) -> Tensor | None:
        """Which slots each of the ``count`` newest tokens may read, [batch, count, held]."""
        if count == 1:
            return None if self.table.full else (self.table.position != NOBODY)[:, None, :]
        slot = torch.arange(self.table.held, device=self.device)
        causal = slot <= torch.arange(count, device=self.device)[:, None] + self.table.held - count
        return causal[None] & (self.table.position != NOBODY)[:, None, :]

    def note(self, mass: Tensor, fresh: int) -> None:
        """Remember what the newest queries looked at, and let nobody exceed the high budget.

        Args:
            mass: float32 [batch, queries, held].
        """
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
        """Evict what exceeds the budgets (of a layer of mean depth), once in ``slack`` steps.

        Then each row is cut to the lowest of its budgets since the last time. All rows are cut in
        the same step, since to move the tokens of one is to move those of all.
        """
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
        """This layer's part of a mean budget."""
        return max(self._settings.window + self._settings.slack, round(mean * self._share))

    def get_seq_length(self) -> int:
        """Tokens of the text so far, evicted ones counted: positions go on."""
        return self.table.seen if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(slots with the new ones, tokens of the text before the first slot)``."""
        held = self.table.held if self.is_initialized else 0
        return held + query_length, self.get_seq_length() - held

    def get_max_length(self) -> int:
        """No limit to the text."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized, self.exact, self.fresh = False, True, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows that beam search goes on with."""
        if self.is_initialized:
            self.store.select(beam_idx.to(self.device))
            self.table.select(beam_idx.to(self.device))
            self._lowest = [self._lowest[row] for row in beam_idx.tolist()]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows alone."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(len(self.table.valid))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.is_initialized:
            rows = torch.arange(len(self.table.valid)).repeat_interleave(repeats)
            self.reorder_cache(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what was evicted because of a token does not come back when it is removed."""
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
