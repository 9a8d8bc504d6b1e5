"""The attention function of a model with the cache: sdpa's until a token is evicted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...kernels.backends.mixed import observed_mass
from ...kernels.ops import mixed_attention
from .layer import ConfLayer
from .settings import UnsupportedError

NAME: Final = "kvgraph_conf"
AT_ONCE: Final = 64  # queries computed together once tokens have been evicted; chosen
REPLACED: Final = "sdpa"  # the attention that it replaces, bit for bit
_UNKNOWN: Final = ("softcap", "s_aux", "position_bias", "head_mask")  # these change attention


def register() -> None:
    """Register the attention function with transformers, under ``NAME``."""
    AttentionInterface.register(NAME, conf_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def conf_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to a layer of the cache and report the attention to it; other caches get sdpa.

    ``query`` is [batch, heads, queries, dims]; ``key`` is the result of the cache's ``update``, and
    carries its layer. Returns the output, [batch, queries, heads, dims], and no weights. Raises
    UnsupportedError.
    """
    layer: ConfLayer | None = getattr(key, "kvgraph_layer", None)
    if layer is None:
        plain: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return plain
    _refuse(kwargs)
    count, scale = query.shape[2], query.shape[3] ** -0.5 if scaling is None else scaling
    layer.arrived(_present(attention_mask, count))
    if layer.exact:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        mass = _observed(layer, query, key, scale)
    else:
        read, mass = _read(layer, query, scale)
        output = read.transpose(1, 2).contiguous()
    layer.note(mass, count)
    return output, None


def _read(layer: ConfLayer, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output of queries, computed in groups, and the attention of the newest ones."""
    visible, count = layer.visible(query.shape[2]), query.shape[2]
    # A ranker that needs all queries, such as H2O's, gets them in one group.
    outputs, size = [], max(AT_ONCE, min(layer.observed, count))
    first = count % size or min(size, count)  # so that the last ones are ``size``
    for begin, end in pairwise([0, *range(first, count + 1, size)]):
        seen = None if visible is None else visible[:, begin:end]
        attended = mixed_attention(query[:, :, begin:end], layer.store.parts(), seen, scale)
        outputs.append(attended.output)
    return torch.cat(outputs, 2), attended.mass[:, -layer.observed :]


def _observed(layer: ConfLayer, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """The attention of the newest queries, as many as the ranker wants."""
    if query.shape[2] == 1:
        return mixed_attention(query, layer.store.parts(), layer.visible(1), scale).mass
    visible = layer.visible(query.shape[2])
    if visible is not None:
        visible = visible[:, -layer.observed :]
    recent = query[:, :, -layer.observed :]
    return observed_mass(recent, key, visible, scale)


def _present(mask: Tensor | None, count: int) -> Tensor | None:
    """Which new tokens are not padding, [batch, count]: those that the last one may read. Raises
    UnsupportedError.
    """
    if mask is None or count == 1:
        return None
    newest = mask[:, 0, -1, -count:]
    if newest.dtype == torch.bool:
        return newest
    present = newest == 0
    if not bool((present | (newest <= torch.finfo(newest.dtype).min / 2)).all()):
        raise UnsupportedError("ConfKVCache does not know attention with a bias in its mask")
    return present


def _refuse(kwargs: dict[str, Any]) -> None:
    for name in (*_UNKNOWN, "sliding_window"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"ConfKVCache does not know attention with {name}")
