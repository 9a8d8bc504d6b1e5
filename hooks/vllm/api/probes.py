"""Renders made conversations with vLLM's own renderer, to learn what its chat template writes."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..layers.decoder import decoder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Message = dict[str, Any]

TOOL: Final = "zq_probe_tool"
KEY: Final = "zqkey"
VALUE: Final = "zqvalue"
ANSWER: Final = "Zqanswer"
RESULT: Final = "Zqresult"
DESCRIPTION: Final = "A probe."
CALL_IDS: Final = ("zqcall001", f"functions.{TOOL}:0")
"""Names of a call: some templates want nine letters and digits, some write no other name."""

_TOOLS: Final[list[Message]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": DESCRIPTION,
            "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}},
        },
    }
]
ASKED: Final[Message] = {"role": "user", "content": "Zqquestion"}


class Probes:
    """Renders as the API process will.

    Args:
        config: The engine's.
        chat_template: The one that the server was given in place of the model's; None: the model's.

    Attributes:
        special: Tokens that stand for themselves, whatever is beside them.
        text: Decodes tokens, special ones too.

    Raises:
        Exception: Whatever vLLM raises where a model has no tokenizer or no renderer.
    """

    def __init__(self, config: VllmConfig, chat_template: str | None = None) -> None:
        from vllm.renderers import renderer_from_config

        self._renderer = renderer_from_config(_of_text_alone(config))
        self._template = chat_template
        self._tokenizer = self._renderer.get_tokenizer()
        self.special = special_tokens(self._tokenizer)
        self.text = decoder(self._tokenizer)

    def close(self) -> None:
        """Give the renderer's threads back."""
        self._renderer.shutdown()

    @property
    def end(self) -> int | None:
        """The token that the tokenizer calls the end."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    def answered(self) -> list[int]:
        """Tokens of a conversation that goes on behind an answer in prose."""
        answer = {"role": "assistant", "content": ANSWER}
        return self.render([ASKED, answer, {"role": "user", "content": RESULT}])

    def called(self, call_id: str, with_result: bool = True) -> list[int]:
        """Tokens of a conversation with a tool call, and its result if that is wanted."""
        return self.render([ASKED, *called(call_id)[: None if with_result else 1]])

    def render(self, messages: Sequence[Message], tools: bool = True) -> list[int]:
        """Tokens of a conversation, with a description of the tool if ``tools``."""
        from vllm.renderers import ChatParams

        asked = {
            "tools": copy.deepcopy(_TOOLS) if tools else None, "tokenize": True,
            "add_generation_prompt": False, "continue_final_message": False,
        }  # fmt: skip
        params = ChatParams(chat_template=self._template, chat_template_kwargs=asked)
        with _quiet():
            _, prompt = self._renderer.render_messages(copy.deepcopy(list(messages)), params)
        tokens = prompt.get("prompt_token_ids")
        if tokens is None:
            tokens = self._tokenizer.encode(prompt["prompt"], add_special_tokens=False)
        return list(tokens)


def called(call_id: str) -> list[Message]:
    """A call of the tool, and its result."""
    function = {"name": TOOL, "arguments": f'{{"{KEY}": "{VALUE}"}}'}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": TOOL, "content": RESULT},
    ]


def text_place(
    probes: Probes,
    tokens: Sequence[int],
    text: str,
    first: int,
    end: bool = False,
    last: bool = False,
) -> int | None:
    """The place of the token in which ``text`` begins, or with ``end`` the one behind it; None if
    it does not stand in ``tokens[first:]``.

    Args:
        last: Whether its last place is meant, not its first.
    """
    whole = probes.text(tokens[first:])
    at = whole.rfind(text) if last else whole.find(text)
    if at < 0:
        return None
    wanted = at + (len(text) if end else 1)
    low, high = first + 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if len(probes.text(tokens[first:middle])) < wanted:
            low = middle + 1
        else:
            high = middle
    return low if end else low - 1


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that stand for themselves, whatever is beside them."""
    found = set(tokenizer.all_special_ids)
    with contextlib.suppress(Exception):  # not every tokenizer of vLLM's has it
        found.update(tokenizer.get_added_vocab().values())
    return frozenset(found)


def _of_text_alone(config: VllmConfig) -> VllmConfig:
    """The same for a model without images and the like: their processors are not needed here."""
    text = copy.copy(config)
    text.model_config = copy.copy(config.model_config)
    text.model_config.multimodal_config = None
    return text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A template that refuses a probe is no news for whoever reads vLLM's log."""
    logger = logging.getLogger("vllm.renderers.hf")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False
