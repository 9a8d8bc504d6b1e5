"""Makes vLLM answer what was recorded: a logits processor that the bench names on a command line.

It belongs to the bench and runs in every arm, stock among them. A request brings its answer, token
by token, in ``vllm_xargs``; without one it is left alone. Forward passes and KV are the model's
own: only which token is taken is not its choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

if TYPE_CHECKING:
    import torch

from ..errors import AnswerError

ANSWER: Final = "kvgraph_bench_answer"
"""The key in ``vllm_xargs``: a list of token ids; the last should end the request."""

OPTIONS: Final = ("--logits-processors", f"{__name__}:ForcedAnswers")
"""What a server's command line needs."""

_Forced = tuple[Sequence[int], Sequence[int]]


class ForcedAnswers(LogitsProcessor):  # type: ignore[misc]
    """Gives every request that brings an answer the token that is next in it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._forced: dict[int, _Forced] = {}  # row of the batch → answer, output so far

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what is no answer, as HTTP 400."""
        answer = _answer(sampling_params)
        if answer is not None and not _is_tokens(answer):
            raise AnswerError(f"{ANSWER} must be a list of token ids, at least one")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._forced, batch_update, _forced)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (answer, said) in self._forced.items():
            if len(said) < len(answer):
                token = answer[len(said)]
                logits[row] = float("-inf")
                logits[row, token] = 0.0
        return logits


def _forced(params: Any, prompt: list[int] | None, said: list[int]) -> _Forced | None:
    answer = _answer(params)
    return None if answer is None else (answer, said)


def _answer(params: Any) -> Any:
    return (params.extra_args or {}).get(ANSWER)


def _is_tokens(answer: Any) -> bool:
    return (
        isinstance(answer, list)
        and len(answer) > 0
        and all(type(token) is int and token >= 0 for token in answer)
    )
