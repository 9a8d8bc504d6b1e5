"""Reads what a client states about its messages, and finds each message in the rendered prompt.

    {"messages": [{"index": 0, "layer": "rules", "identity": "file:policy.md#0", "pinned": 60},
                  {"role": "tool", "priority": 20, "memory_id": "m-17"}]}

stands in ``kv_transfer_params["kvgraph"]``, or in ``vllm_xargs["kvgraph"]`` as one JSON string.
``kv_transfer_params["evoke"]`` is understood too. Malformed fields are left out, with one warning
for each field name: a request never fails for them.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgspec
from cachetools import LRUCache

from ...graph.types import LAYER_BY_NAME, SourceLayer
from ...graph.wire.events import MAX_NAME
from ..threads import Once
from .borders import BorderTable, LayerReader, Run, TokenPlaces, decoder
from .hints import KEY, MAX_SEGMENTS, importance_of, lease_of, name_of, priority_of
from .sections import SectionSplitter

EVOKE: Final = "evoke"
LONGEST: Final = 1 << 20  # characters of hints in a string; chosen
_ROLES: Final = {
    "system": "rules", "developer": "rules", "user": "user_turn", "assistant": "generation",
    "tool": "tool_result", "function": "tool_result",
}  # fmt: skip
_EVOKE_KEYS: Final = {"source_type", "priority", "evoke_session"}
_FIELDS: Final = frozenset(
    {"index", "role", "layer", "importance", "priority", "pinned", "identity", "memory_id"}
)


# Field → the segment's field, and what reads it; an importance counts before a priority.
_READERS: Final[dict[str, tuple[str, Callable[[object], Any]]]] = {
    "priority": ("importance", priority_of),
    "importance": ("importance", importance_of),
    "pinned": ("pinned", lease_of),
    "identity": ("name", name_of),
    "memory_id": ("memory_id", name_of),
}


class MessageHint(NamedTuple):
    # Index among the client's own messages, negative from the end; None for all messages of the
    # role.
    number: int | None
    role: str | None  # role of the messages, if no index is given
    segment: dict[str, Any]  # fields of the resulting segment, without its range


def layer_of(role: str) -> str:
    """Return the layer of a message whose hint states none."""
    return _ROLES.get(role, "user_turn")


def take_hints(extra: dict[str, Any], once: Once) -> dict[str, Any]:
    """Remove all kvgraph hints from a request's own copy of its extra arguments and return them."""
    transfer = extra.get("kv_transfer_params")
    transfer = dict(transfer) if isinstance(transfer, dict) else {}
    stated = _object(extra.pop(KEY, None), once) | _object(transfer.pop(KEY, None), once)
    stated |= _of_evoke(transfer.get(EVOKE), stated)
    if transfer or "kv_transfer_params" in extra:
        extra["kv_transfer_params"] = transfer
    return {
        _plain(name, MAX_NAME): _cut(name, value) for name, value in list(stated.items())[:_FEW]
    }


_FEW: Final = 32  # most fields read of an object; more than exist
_LONG: Final = 4096  # longest field in characters; chosen: any secret fits
_INTEGERS: Final = 1 << 63  # larger integers are sent as floats; chosen, MessagePack ends near
_FLOATS: Final = 1 << 1023  # floats this large are not sent at all


def _cut(name: str, value: Any) -> Any:
    """Return what of a field is sent to the engine: not too long, and encodable."""
    if isinstance(value, str):
        return _plain(value, _LONG)
    if isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
        return float(value) if abs(value) < _FLOATS else None
    if name in ("segments", "messages") and isinstance(value, list):
        return [_cut_part(part) for part in value[: MAX_SEGMENTS + 1]]  # so that more is noticed
    return None if isinstance(value, list | dict) else value


def _cut_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return None if isinstance(part, list | str) else part
    return {_plain(name, MAX_NAME): _cut("", value) for name, value in list(part.items())[:_FEW]}


def _plain(text: str, most: int) -> str:
    """Return the start of a text, without lone surrogates, which JSON escapes can bring in."""
    return text[:most].encode("utf-8", "replace").decode()


def message_hints(stated: dict[str, Any], once: Once) -> list[MessageHint]:
    listed = stated.pop("messages", None)
    if listed is None:
        return []
    if not isinstance(listed, list):
        _warn(once, "messages", "must be a list")
        return []
    if len(listed) > MAX_SEGMENTS:
        _warn(once, "messages", f"holds entries beyond the first {MAX_SEGMENTS}")
    return [hint for item in listed[:MAX_SEGMENTS] for hint in _hints(item, once)]


def _hints(item: object, once: Once) -> Iterator[MessageHint]:
    if not isinstance(item, dict):
        _warn(once, "messages", "must hold objects")
        return
    if unknown := item.keys() - _FIELDS:
        _warn(once, "an unknown field of a message", f"is left out ({len(unknown)} of them)")
    role, index = item.get("role"), item.get("index")
    segment = dict(_allowed(item, once))
    if isinstance(layer := item.get("layer"), str) and layer in LAYER_BY_NAME:
        segment["layer"] = layer
    elif item.get("layer") is not None:
        _warn(once, "messages.layer", f"must be one of {', '.join(LAYER_BY_NAME)}")
    if isinstance(index, int) and not isinstance(index, bool):
        yield MessageHint(index, None, segment)
    elif isinstance(role, str) and index is None:
        yield MessageHint(None, role, segment)
    else:
        _warn(once, "messages", "must name an index, an integer, or a role")


def _allowed(item: dict[str, Any], once: Once) -> Iterator[tuple[str, Any]]:
    """Yield a segment's fields from a hint's valid ones."""
    for name, (called, read) in _READERS.items():
        if item.get(name) is not None:
            try:
                value = read(item[name])
            except (ValueError, TypeError) as error:
                _warn(once, f"messages.{name}", str(error))
            else:
                yield called, value


def _object(value: object, once: Once) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return dict(value or {})
    if isinstance(value, str) and len(value) <= LONGEST:
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = None
        if isinstance(read, dict):
            return read
    _warn(once, KEY, f"must be an object, or its JSON text of at most {LONGEST} characters")
    return {}


def _of_evoke(value: object, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Evoke's hints, which concern the last message of a kind."""
    if not isinstance(value, dict) or not _EVOKE_KEYS & value.keys():
        return {}
    found: dict[str, Any] = {}
    if "evoke_session" in value and "session" not in stated:
        found["session"] = value["evoke_session"]
    kind = value.get("source_type")
    if isinstance(kind, str) and "messages" not in stated:
        hint = {"priority": value["priority"]} if "priority" in value else {}
        if kind in LAYER_BY_NAME:
            hint |= {"index": -1, "layer": kind}
        else:
            hint |= {"role": kind}
        found["messages"] = [hint]
    return found


def _warn(once: Once, field: str, problem: str) -> None:
    once.warn(field, "kvgraph: of a request's hints, %s %s; ignored (said once)", field, problem)


_REMEMBERED: Final = 256  # system texts whose position is remembered; chosen
_TELLING: Final = 8  # shortest text that is searched for, in characters; chosen
_MOST_TYPED: Final = 64  # strings that name special tokens; more are not looked for. Chosen
_DEEPEST: Final = 32  # nesting of lists in a message; chosen

Messages = Sequence[Mapping[str, Any]]


class LayerMarker:
    """Marks a rendered conversation's layers, telling the template's borders from typed ones."""

    def __init__(self, table: BorderTable, tokenizer: Any) -> None:
        self._table = table
        self._decode = decoder(tokenizer)
        self._reader = LayerReader(table)
        self._sections = SectionSplitter(table, self._decode)
        names = {self._decode([token]): token for token in sorted(self._reader.first_tokens)}
        known = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._encoded = [name.encode("utf-8", "surrogatepass") for name in known]
        self._systems: LRUCache[bytes, _Place] = LRUCache(_REMEMBERED)

    def runs(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any = None
    ) -> list[Run]:
        try:
            runs = self._marked(tokens, text, messages, extras)
        except TooDeepError:
            runs = None
        return self._sections.split(tokens, self._reader.stream(tokens) if runs is None else runs)

    def _marked(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any
    ) -> list[Run] | None:
        forged = self._forged(tokens, text, messages, extras)
        if forged is None:
            return None
        has_tools = bool(isinstance(extras, Mapping) and extras.get("tools"))
        runs = _system_first(self._reader.marked(tokens, forged, has_tools))
        return runs if self._table.has_system else self._with_system(tokens, messages, runs)

    def _forged(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any
    ) -> frozenset[int] | None:
        if self._table.sealed:
            return frozenset()
        if self._may_name(extras) and any(map(self._special.search, strings_in(extras))):
            return None
        if not self._may_name(messages):
            return frozenset()
        typed = [each for each in strings_in(list(messages)) if self._special.search(each)]
        if not typed:
            return frozenset()
        if text is None:
            return None
        spans = self._spans(text, messages)
        names = [found.start() for found in self._special.finditer(text)]
        places = [place for place, token in enumerate(tokens) if token in self._reader.first_tokens]
        if spans is None or len(names) != len(places):
            return None
        inside = _inside(spans)
        return frozenset(place for name, place in zip(names, places, strict=True) if inside(name))

    def _may_name(self, value: Any) -> bool:
        """Whether a string in ``value`` may name a special token; far cheaper than a walk."""
        try:
            encoded = msgspec.msgpack.encode(value)
        except Exception:  # other than plain data is walked
            return True
        return any(name in encoded for name in self._encoded)

    def _spans(self, text: str, messages: Messages) -> list[tuple[int, int]] | None:
        """Return where messages that name special tokens stand; None if one cannot be told."""
        spans, cursor = [], 0
        typed = Counter(s for s in strings_in(list(messages)) if self._special.search(s))
        if typed.total() > _MOST_TYPED:
            return None
        for string, is_content in _by_message(messages):
            if string not in typed and (len(string) < _TELLING or not is_content):
                continue
            found = find_string(text, string, cursor)
            if found is not None:
                cursor = found[1]
            if string in typed:
                if found is None or text.count(text[slice(*found)]) > typed[string]:
                    return None
                spans.append(found)
        return spans

    def _with_system(self, tokens: Sequence[int], messages: Messages, runs: list[Run]) -> list[Run]:
        """``runs`` with the system text split off the user's turn, or what stands before it."""
        system = next((each for each in messages if each.get("role") in _SYSTEM), None)
        content = "\n".join(strings_in(system.get("content"))).strip() if system else ""
        turns = [at for at, run in enumerate(runs) if run.layer == SourceLayer.USER_TURN]
        if not content or not turns:
            return runs
        at = turns[-1 if self._table.system_last else 0]
        run = runs[at] if at else runs[at]._replace(start=0)
        start, end = self._place_of(tokens[run.start : run.end], content)
        split = [
            Run(run.layer, run.start, run.start + start),
            Run(int(SourceLayer.RULES), run.start + start, run.start + end),
            Run(run.layer, run.start + end, run.end),
        ]
        return [*runs[:at], *(part for part in split if part.start < part.end), *runs[at + 1 :]]

    def _place_of(self, tokens: Sequence[int], content: str) -> tuple[int, int]:
        """Return the token range of ``content``; an empty one if it is not found."""
        # A request may bring another template, which writes the text elsewhere. So what is
        # remembered counts only while the same tokens stand there.
        key = hashlib.blake2b(content.encode("utf-8", "surrogatepass")).digest()
        known = self._systems.get(key)
        if known is None or known.tokens != _digest(tokens[known.start : known.end]):
            text = self._decode(tokens)
            at = text.find(content)
            if at < 0:
                return 0, 0
            places = TokenPlaces(self._decode, tokens)
            if places.length != len(text):
                return 0, 0
            start, end = places.of(at), places.of(at + len(content) - 1) + 1
            known = self._systems[key] = _Place(start, end, _digest(tokens[start:end]))
        return known.start, known.end


class _Place(NamedTuple):
    """Token range of a system text in the first user's turn, and a digest of these tokens."""

    start: int
    end: int
    tokens: bytes


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes()).digest()


_SYSTEM: Final = ("system", "developer")


def _system_first(runs: list[Run]) -> list[Run]:
    """Demote system texts after the first answer to context."""
    # A conversation may have any number of system texts; only those at its head define the model.
    begun, kept = False, []
    for run in runs:
        begun |= run.layer in (SourceLayer.GENERATION, SourceLayer.TOOL_RESULT)
        late = begun and run.layer < SourceLayer.CAPABILITIES
        kept.append(run._replace(layer=int(SourceLayer.CONTEXT)) if late else run)
    return kept


class TooDeepError(ValueError):
    """A message is nested too deeply to be searched."""


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield all strings in a message, and its keys, in order. Raises TooDeepError."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        if depth >= _DEEPEST:
            raise TooDeepError(f"nested more than {_DEEPEST} deep")
        fields = value.items() if isinstance(value, Mapping) else ((None, each) for each in value)
        for key, each in fields:
            yield from strings_in(key, depth)
            yield from strings_in(each, depth + 1)


def _by_message(messages: Messages) -> Iterator[tuple[str, bool]]:
    """Yield all strings in messages, and whether each belongs to a content, in order."""
    for message in messages:
        for name, value in message.items():
            yield from ((string, name == "content") for string in strings_in(value))


def find_string(text: str, string: str, first: int) -> tuple[int, int] | None:
    """Find a message's string in a prompt: as it is, stripped, or escaped as JSON."""
    for form in (string, string.strip(), json.dumps(string)[1:-1],
                 json.dumps(string, ensure_ascii=False)[1:-1]):  # fmt: skip
        at = text.find(form, first)
        if at >= 0 and form:
            return at, at + len(form)
    return None


def _inside(spans: list[tuple[int, int]]) -> Callable[[int], bool]:
    """Return a test for being in one of ``spans``, which are disjoint and ascending."""
    starts = [start for start, _ in spans]

    def inside(place: int) -> bool:
        at = bisect_right(starts, place) - 1
        return at >= 0 and place < spans[at][1]

    return inside


_DEEPEST_PLACE: Final = 4  # nesting of parts in a content; chosen


class ClientMessage(NamedTuple):
    role: str
    texts: tuple[str, ...]  # all strings in its content, in order
    numbered: bool = True  # whether it counts for message indices; a separate system field does not


def client_messages(messages: Sequence[Any]) -> list[ClientMessage]:
    found = []
    for each in messages:
        plain = each if isinstance(each, Mapping) else getattr(each, "__dict__", {})
        texts = (*_texts(plain.get("content")), *_texts(plain.get("output")))
        role = plain.get("role") or ("tool" if plain.get("output") is not None else "user")
        found.append(ClientMessage(str(role), texts))
    return found


def _texts(content: Any, depth: int = 0) -> Iterator[str]:
    """Yield the texts of a message's content: a string, or parts with texts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | tuple) and depth < _DEEPEST_PLACE:
        for part in content:
            plain = part if isinstance(part, Mapping | str) else getattr(part, "__dict__", {})
            if isinstance(plain, str):
                yield plain
            else:
                yield from _texts(plain.get("text") or plain.get("content"), depth + 1)


class MessagePlaces:
    """Finds where messages stand in one prompt."""

    def __init__(self, tokens: Sequence[int], text: str | None, tokenizer: Any) -> None:
        self._tokens = tokens
        self._decode = decoder(tokenizer)
        self._text = self._decode(tokens) if text is None else text
        self._offsets = None if text is None else _offsets(tokens, text, tokenizer)

    def of(
        self, messages: Sequence[ClientMessage], wanted: Collection[int]
    ) -> list[tuple[int, int] | None]:
        """Return the token ranges ``[start, end)`` of the messages at the ``wanted`` indices; None
        for each that is not found.
        """
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
        """Return the character range of a message, from its first text to its last."""
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
        """Token positions by decoding; None if the decoded text differs."""
        if self._decode(self._tokens) != self._text:
            return None
        places = TokenPlaces(self._decode, self._tokens)
        return places if places.length == len(self._text) else None


def _offsets(
    tokens: Sequence[int], text: str, tokenizer: Any
) -> tuple[list[int], list[int]] | None:
    """Return where each token begins and ends in ``text``; None if the tokenizer cannot say."""
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except Exception:  # not every tokenizer of vLLM's can
        return None
    if list(encoded["input_ids"]) != list(tokens):
        return None
    begins, ends = zip(*encoded["offset_mapping"], strict=True)
    return list(begins), list(ends)


CHAT_KEY: Final = "kvgraph_chat"
"""Key of the ``RenderedChat`` in a rendered prompt, inside the API process."""

CLIENTS: Final[ContextVar[list[ClientMessage] | None]] = ContextVar("kvgraph_clients", default=None)
"""The client's own messages, set where vLLM's serving class converts them before rendering."""


class RenderedChat(NamedTuple):
    """A rendered prompt together with the client's messages."""

    marks: dict[str, Any] | None  # the prompt's layers as marks; None if they were not read
    own: Callable[[], list[ClientMessage]]  # reads the client's own messages, which hints refer to
    tokens: Sequence[int]
    text: str | None  # the text that was tokenized; None if only the tokens are known
    tokenizer: Any


def resolve_message_hints(
    stated: dict[str, Any],  # all hints of the request; changed
    chat: RenderedChat | None,  # None if the request has no messages
    once: Once,
) -> dict[str, Any]:
    """Return a request's hints, with hints about messages turned into segments."""
    hints = message_hints(stated, once)
    if not hints:
        return stated
    if chat is None:
        once.warn(
            "no messages", "kvgraph: a request without messages names some; ignored (said once)"
        )
        return stated
    segments = stated["segments"] if isinstance(stated.get("segments"), list) else []
    messages = chat.own()
    about = hints_by_message(hints, messages)
    if not about:
        once.warn(
            "no such message",
            "kvgraph: a request's hints name messages that it has not; ignored (said once)",
        )
    places = MessagePlaces(chat.tokens, chat.text, chat.tokenizer)
    for place, (at, of_message) in zip(places.of(messages, about), about.items(), strict=True):
        if place is None:
            once.warn(
                "not found",
                "kvgraph: a request's hints name messages that are not found in "
                "its prompt; ignored (said once)",
            )
        else:
            layer = {"layer": layer_of(messages[at].role)}
            where = {"start": place[0], "end": place[1]}
            room = max(0, MAX_SEGMENTS - len(segments))
            segments += [{**layer, **hint.segment, **where} for hint in of_message[:room]]
    if segments:
        stated["segments"] = segments
    return stated


def hints_by_message(
    hints: Sequence[MessageHint], messages: Sequence[ClientMessage]
) -> dict[int, list[MessageHint]]:
    """Group hints by the index of the message they concern; at most ``MAX_SEGMENTS`` in all."""
    numbered = [at for at, message in enumerate(messages) if message.numbered]
    of_role: dict[str | None, list[int]] = {}
    for at, message in enumerate(messages):
        of_role.setdefault(message.role, []).append(at)
    found: dict[int, list[MessageHint]] = {}
    room = MAX_SEGMENTS
    for hint in hints:
        places = of_role.get(hint.role, [])
        if hint.number is not None:
            places = _one(numbered, hint.number)
        for at in places[:room]:
            found.setdefault(at, []).append(hint)
        room -= min(room, len(places))
    return dict(sorted(found.items()))


def _one(places: list[int], number: int) -> list[int]:
    return [places[number]] if -len(places) <= number < len(places) else []
