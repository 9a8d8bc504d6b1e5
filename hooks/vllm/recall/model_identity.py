"""What a calibration belongs to: a model's weights, and how its keys are rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....kernels.maths.rope import rope_from_config
from ...recall.gate import identity_of
from ..transfers.kv_identity import weights_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def model_identity(model: ModelConfig, max_model_len: int | None) -> str:
    """Return all that a calibration depends on: the weights, and how keys are rotated.

    Args:
        model: Its name or path, and its Hugging Face configuration.
        max_model_len: The longest sequence that will be served.

    Raises:
        RopeError: Keys of this model cannot be moved.
        StorageError: The weights cannot be told from others.
    """
    rope = rope_from_config(model.hf_config, max_model_len)
    return identity_of(weights_of(model), (rope.inv_freq.tolist(), rope.start, rope.pairing.value))
