"""How long an engine takes for a request: a plain model, for time to pass in a simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Prefill at a rate, then a step a token. The defaults are an 8B model on one H100-class GPU.

    Attributes:
        prefill_tokens_per_s: Prompt tokens computed a second.
        decode_s_per_token: Seconds an output token.
    """

    prefill_tokens_per_s: float = 20_000.0
    decode_s_per_token: float = 0.02

    def prefill_seconds(self, computed_tokens: int) -> float:
        """Until the first token: the share of TTFT that a hit saves."""
        return computed_tokens / self.prefill_tokens_per_s

    def seconds(self, computed_tokens: int, output_tokens: int) -> float:
        """From being scheduled to being done."""
        return self.prefill_seconds(computed_tokens) + output_tokens * self.decode_s_per_token
