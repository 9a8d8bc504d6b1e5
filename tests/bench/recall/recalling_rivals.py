"""Caches that keep a whole text elsewhere and read a part of it back at each step, in torch.

Each is its authors' rule for what is read, scaled down to texts of 507 tokens. Both read the text
itself with nothing left out, as ours does, and are held to the budget from the question on: that is
more than InfLLM's own way, which reads a long text in chunks under the same budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from kvgraph.kernels.rope import Rope
from torch import Tensor

SINKS: Final = 4  # first tokens that InfLLM always reads
BLOCKS: Final = 8  # K: what InfLLM reads back at each step
PAGE: Final = 8  # tokens; ArkVale's have 32, of which the tightest budget would hold one; chosen
_REPRESENTATIVES: Final = 0.25  # of a block's tokens stand for it; chosen: one at least


class Text(NamedTuple):
    """What one layer knows of a text, each [heads, tokens, dims]."""

    keys: Tensor  # as they were computed, not rotated
    values: Tensor  # as they were computed
    heeded: Tensor  # float [heads, tokens]: how much the tokens behind each one look at it


class Chosen(NamedTuple):
    mask: Tensor  # bool [heads, tokens]
    distance: Tensor  # int [tokens]: how far behind the query each token is taken to stand


class Recalling(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, query: Tensor, text: Text, ahead: int, budget: int, rope: Rope) -> Chosen: ...


@dataclass(frozen=True, slots=True)
class InfLLM:
    """The first tokens, the newest, and K blocks whose representative keys the query looks at most.

    A block's representatives are the tokens that those behind them heeded most, and stand for it by
    the mean of their keys; all heads of a layer read the same blocks. Whatever is not among the
    newest is taken to stand as far off as the oldest of them (arXiv 2402.04617).
    """

    name: str = "infllm"

    def choose(self, query: Tensor, text: Text, ahead: int, budget: int, rope: Rope) -> Chosen:
        tokens, size = text.keys.shape[1], max(2, budget // 2 // BLOCKS)
        newest = budget - SINKS - BLOCKS * size
        whole = (tokens - newest - SINKS) // size
        end = SINKS + whole * size
        stand = _representatives(text, SINKS, end, size)  # [heads, blocks, dims]
        distance = torch.arange(tokens - 1, -1, -1) + ahead
        distance[: tokens - newest] = newest + ahead
        turned = _turned(rope, query, newest + ahead)
        alike = (stand * turned[:, None]).sum((0, 2))
        mask = torch.zeros(text.keys.shape[:2], dtype=torch.bool)
        mask[:, :SINKS] = mask[:, tokens - newest :] = True
        for block in alike.topk(min(BLOCKS, whole)).indices.tolist():
            mask[:, SINKS + block * size : SINKS + (block + 1) * size] = True
        return Chosen(mask, distance)


@dataclass(frozen=True, slots=True)
class ArkVale:
    """The first page, the newest, and those whose keys a query could look at most.

    A page is known by the box around its keys, which bounds any query's product with one of them;
    each head reads pages of its own, at the places where they stand (NeurIPS 2024).
    """

    name: str = "arkvale"

    def choose(self, query: Tensor, text: Text, ahead: int, budget: int, rope: Rope) -> Chosen:
        heads, tokens, _ = text.keys.shape
        distance = torch.arange(tokens - 1, -1, -1) + ahead
        first = tokens % PAGE or PAGE  # of the text; whole pages behind it
        keys = _turned_by(rope, text.keys, -distance)
        pages = keys[:, first:].unflatten(1, (-1, PAGE))
        at = query[:, None]
        bound = torch.maximum(at * pages.amin(2), at * pages.amax(2)).sum(2)  # [heads, pages]
        bound[:, -1] = torch.inf
        count = min((budget - first) // PAGE, bound.shape[1])
        mask = torch.zeros(heads, bound.shape[1], dtype=torch.bool)
        mask.scatter_(1, bound.topk(count, 1).indices, True)
        head = torch.ones(heads, first, dtype=torch.bool)
        return Chosen(torch.cat([head, mask.repeat_interleave(PAGE, 1)], 1), distance)


RECALLING: Final[tuple[Recalling, ...]] = (InfLLM(), ArkVale())


class RecallingModel:
    """A Llama whose layers read a part of a text, chosen anew by each layer at each step."""

    def __init__(self, model: Any, rope: Rope) -> None:
        self._model, self._rope = model.model, rope
        self._head, self._dims = model.lm_head, model.config.head_dim
        assert model.config.num_key_value_heads == model.config.num_attention_heads

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def read(self, ids: Sequence[int]) -> list[Text]:
        """Read a text with nothing left out; what each layer keeps of it."""
        hidden, texts = self._model.embed_tokens(torch.tensor(ids)), list[Text]()
        places = torch.arange(len(ids))
        behind = places[:, None] >= places[None]
        for layer in self._model.layers:
            query, key, value = self._projected(layer, hidden)
            turned = [_turned_by(self._rope, each, places) for each in (query, key)]
            weight = _weights(turned[0] @ turned[1].mT, self._dims, behind)
            texts.append(Text(key, value, (weight * ~torch.eye(len(ids)).bool()).sum(1)))
            hidden = self._behind(layer, hidden, weight @ value)
        return texts

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def follow(
        self, texts: Sequence[Text], ids: Sequence[int], by: Recalling, budget: int
    ) -> list[int]:
        """First choices behind each of ``ids``, which stand behind the text; one step each."""
        said, own = list[int](), [list[tuple[Tensor, Tensor]]() for _ in texts]
        for step, token in enumerate(ids):
            hidden = self._model.embed_tokens(torch.tensor([token]))
            for layer, text, since in zip(self._model.layers, texts, own, strict=True):
                query, key, value = self._projected(layer, hidden)
                since.append((key, value))
                read = self._step(
                    query, text, since, by.choose(query[:, 0], text, step + 1, budget, self._rope)
                )
                hidden = self._behind(layer, hidden, read)
            said.append(int(self._head(self._model.norm(hidden))[0].argmax()))
        return said

    def _step(
        self, query: Tensor, text: Text, since: Sequence[tuple[Tensor, Tensor]], read: Chosen
    ) -> Tensor:
        """What one query [heads, 1, dims] reads of the text, and of all tokens since."""
        later = [torch.cat(each, 1) for each in zip(*since, strict=True)]
        distance = torch.cat([read.distance, torch.arange(len(since) - 1, -1, -1)])
        keys = _turned_by(self._rope, torch.cat([text.keys, later[0]], 1), -distance)
        mask = torch.cat([read.mask, torch.ones(len(query), len(since), dtype=torch.bool)], 1)
        weight = _weights(query @ keys.mT, self._dims, mask[:, None])
        return weight @ torch.cat([text.values, later[1]], 1)

    def _projected(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [heads, tokens, dims], not rotated."""
        it, normed = layer.self_attn, layer.input_layernorm(hidden)
        query, key, value = (
            each(normed).unflatten(1, (-1, self._dims)).transpose(0, 1)
            for each in (it.q_proj, it.k_proj, it.v_proj)
        )
        return query, key, value

    def _behind(self, layer: Any, hidden: Tensor, read: Tensor) -> Tensor:
        """The layer's output, from what its heads read [heads, tokens, dims]."""
        hidden = hidden + layer.self_attn.o_proj(read.transpose(0, 1).flatten(1))
        out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out


def _representatives(text: Text, first: int, end: int, size: int) -> Tensor:
    """Of each block of ``size`` tokens the mean of its most heeded keys, [heads, blocks, dims]."""
    keys = text.keys[:, first:end].unflatten(1, (-1, size))
    heeded = text.heeded[:, first:end].unflatten(1, (-1, size))
    best = heeded.topk(max(1, int(_REPRESENTATIVES * size)), 2).indices
    return keys.gather(2, best[..., None].expand(-1, -1, -1, keys.shape[3])).mean(2)


def _turned(rope: Rope, states: Tensor, by: int) -> Tensor:
    """Rotate [heads, dims] by one distance."""
    return _turned_by(rope, states[:, None], torch.tensor([by]))[:, 0]


def _turned_by(rope: Rope, states: Tensor, by: Tensor) -> Tensor:
    """Rotate [heads, tokens, dims] by a distance for each token."""
    cos, sin = rope.rotation(by)
    return rope.rotate(states.transpose(0, 1), cos, sin).transpose(0, 1)


def _weights(products: Tensor, dims: int, mask: Tensor) -> Tensor:
    return (products / dims**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
