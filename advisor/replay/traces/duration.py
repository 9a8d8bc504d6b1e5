"""How long an engine takes for a request: a plain model, for simulated time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BYTES_PER_TOKEN: Final = 131_072
"""KV of one token, all layers, of an 8B model in bf16 (32 layers, 8 heads of 128)."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Prefill at a constant rate, then one step per token. The defaults are an 8B model on one
    H100-class GPU; chosen.

    Attributes:
        prefill_tokens_per_s: Prompt tokens computed per second.
        decode_s_per_token: Seconds per output token.
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_s_per_token: float = 0.02

    def prefill_seconds(self, computed_tokens: int) -> float:
        """Seconds until the first token: the part of TTFT that a hit saves."""
        return computed_tokens / self.prefill_tokens_per_s

    def seconds(self, computed_tokens: int, output_tokens: int) -> float:
        """Seconds from being scheduled to being done."""
        return self.prefill_seconds(computed_tokens) + output_tokens * self.decode_s_per_token


AGENTS_SERVICE: Final = ServiceModel(prefill_tokens_per_s=9_000.0, decode_s_per_token=0.02)
"""A 70B-class model on H100s, as large agents run on; chosen."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """What loading from host memory costs; the defaults are PCIe 5 x16 and an 8B model in bf16.

    Attributes:
        bytes_per_s: Bandwidth.
        s_per_transfer: Fixed cost of each block's transfer.
        bytes_per_token: KV of one token, all layers.
    """

    bytes_per_s: float = 50e9
    s_per_transfer: float = 10e-6
    bytes_per_token: int = BYTES_PER_TOKEN

    def seconds(self, blocks: int, block_size: int) -> float:
        """Seconds to load ``blocks`` blocks."""
        size = blocks * block_size * self.bytes_per_token
        return size / self.bytes_per_s + blocks * self.s_per_transfer
