"""Which tokens of a rendered prompt a client's messages became."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from ..layers.decoder import decoder
from ..layers.token_places import TokenPlaces
from .layer_marker import find_string

_DEEPEST: Final = 4  # of parts in parts; chosen


class ClientMessage(NamedTuple):
    """A message as its client sent it.

    Attributes:
        texts: All strings in its content, in their order.
        numbered: Whether it is one of its client's messages, and not what stands beside them.
    """

    role: str
    texts: tuple[str, ...]
    numbered: bool = True


def client_messages(messages: Sequence[Any]) -> list[ClientMessage]:
    """Chat messages, whatever they are made of."""
    found = []
    for each in messages:
        plain = each if isinstance(each, Mapping) else getattr(each, "__dict__", {})
        texts = (*_texts(plain.get("content")), *_texts(plain.get("output")))
        role = plain.get("role") or ("tool" if plain.get("output") is not None else "user")
        found.append(ClientMessage(str(role), texts))
    return found


def _texts(content: Any, depth: int = 0) -> Iterator[str]:
    """The texts of a message's content: a string, or parts with texts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | tuple) and depth < _DEEPEST:
        for part in content:
            plain = part if isinstance(part, Mapping | str) else getattr(part, "__dict__", {})
            if isinstance(plain, str):
                yield plain
            else:
                yield from _texts(plain.get("text") or plain.get("content"), depth + 1)


class MessagePlaces:
    """Finds messages in one prompt.

    Args:
        tokens: Of the prompt.
        text: What was tokenized; None: only its tokens are known.
        tokenizer: vLLM's.
    """

    def __init__(self, tokens: Sequence[int], text: str | None, tokenizer: Any) -> None:
        self._tokens = tokens
        self._decode = decoder(tokenizer)
        self._text = self._decode(tokens) if text is None else text
        self._offsets = None if text is None else _offsets(tokens, text, tokenizer)

    def of(
        self, messages: Sequence[ClientMessage], wanted: Collection[int]
    ) -> list[tuple[int, int] | None]:
        """The tokens ``[start, end)`` of each message whose place among ``messages`` is wanted;
        None for those that cannot be found."""
        places: list[tuple[int, int] | None] = []
        cursor = 0
        for at, message in enumerate(messages[: max(wanted, default=-1) + 1]):
            span = self._span(message, cursor)
            if span is not None:
                cursor = span[1]
            if at in wanted:
                places.append(None if span is None else self._tokens_of(*span))
        return places

    def _span(self, message: ClientMessage, first: int) -> tuple[int, int] | None:
        """The characters of a message, from its first text to its last."""
        start, end = -1, first
        for text in message.texts:
            found = find_string(self._text, text, end) if text.strip() else None
            if found is not None:
                start, end = (found[0] if start < 0 else start), found[1]
        return None if start < 0 else (start, end)

    def _tokens_of(self, start: int, end: int) -> tuple[int, int] | None:
        if self._offsets is not None:
            begins, ends = self._offsets
            return bisect_right(ends, start), bisect_left(begins, end)
        if self._decoded is None:
            return None
        return self._decoded.of(start), self._decoded.of(end - 1) + 1

    @cached_property
    def _decoded(self) -> TokenPlaces | None:
        """Where tokens stand in the text, by decoding them; None where they give another one."""
        if self._decode(self._tokens) != self._text:
            return None
        places = TokenPlaces(self._decode, self._tokens)
        return places if places.length == len(self._text) else None


def _offsets(
    tokens: Sequence[int], text: str, tokenizer: Any
) -> tuple[list[int], list[int]] | None:
    """Where each token begins and ends in ``text``; None where the tokenizer cannot say."""
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except Exception:  # not every tokenizer of vLLM's can
        return None
    if list(encoded["input_ids"]) != list(tokens):
        return None
    begins, ends = zip(*encoded["offset_mapping"], strict=True)
    return list(begins), list(ends)
