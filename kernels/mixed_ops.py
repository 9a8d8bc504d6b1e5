"""``mixed_attention`` as others call it: compiled where that can be, and else in torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch

from .backends import mixed_attention as reference
from .backends import mixed_native
from .backends.choice import SWITCH
from .backends.mixed_attention import Attended, Part
from .errors import BuildError
from .tensors import Tensor


def mixed_attention(
    queries: Tensor, parts: Sequence[Part], visible: Tensor | None, scale: float
) -> Attended:
    """Attention over tokens stored in parts; see ``backends.mixed_attention``."""
    if mixed_native.serves(queries, parts) and _is_compiled():
        threads = torch.get_num_threads()
        return mixed_native.mixed_attention(queries, parts, visible, scale, threads)
    return reference.mixed_attention(queries, parts, visible, scale)


@functools.cache
def _is_compiled() -> bool:
    """Whether the compiled path is wanted and can be had; the switch is read once."""
    if os.environ.get(SWITCH, "auto") == "reference":
        return False
    try:
        mixed_native.library()
    except BuildError:
        return False
    return True
