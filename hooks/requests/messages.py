"""What a client says of its messages: read, checked and cut to what may travel to the engine.

    {"messages": [{"index": 0, "layer": "rules", "identity": "file:policy.md#0", "pinned": 60},
                  {"role": "tool", "priority": 20, "memory_id": "m-17"}]}

stands in ``kv_transfer_params["kvgraph"]``, or in ``vllm_xargs["kvgraph"]`` as one JSON string.
``kv_transfer_params["evoke"]`` is understood, too. Whatever is malformed is left out, with one
warning for each field: a request never fails for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Final, NamedTuple

from ...graph.types import LAYER_BY_NAME, SourceLayer
from ...graph.wire.events import MAX_NAME
from ..threads import Once
from .borders import BorderTable, LayerReader, Run, TokenPlaces, decoder
from .hints import KEY, MAX_SEGMENTS, importance_of, lease_of, name_of
from .sections import SectionSplitter

EVOKE: Final = "evoke"
LONGEST: Final = 1 << 20  # characters of hints in a string; chosen
_FULL: Final = 100  # of a priority
_ROLES: Final = {
    "system": "rules", "developer": "rules", "user": "user_turn", "assistant": "generation",
    "tool": "tool_result", "function": "tool_result",
}  # fmt: skip
_EVOKE_KEYS: Final = {"source_type", "priority", "evoke_session"}
_FIELDS: Final = frozenset(
    {"index", "role", "layer", "importance", "priority", "pinned", "identity", "memory_id"}
)


_READERS: Final[dict[str, Callable[[object], Any]]] = {
    "importance": importance_of, "pinned": lease_of, "identity": name_of, "memory_id": name_of,
}  # fmt: skip
_SEGMENTS_NAME: Final = {"identity": "name"}


class MessageHint(NamedTuple):
    """What is said of one message.

    Attributes:
        number: Of the client's own messages; below 0 from the end on; None: all of the role.
        role: Whose messages, where no number is given.
        segment: What becomes a segment, but for its place.
    """

    number: int | None
    role: str | None
    segment: dict[str, Any]


def layer_of(role: str) -> str:
    """The layer of a message whose hint names none."""
    return _ROLES.get(role, "user_turn")


def take_hints(extra: dict[str, Any], once: Once) -> dict[str, Any]:
    """Everything that a request's extra arguments say for us; taken out of ``extra``.

    Args:
        extra: A request's own copy; changed.
    """
    transfer = extra.get("kv_transfer_params")
    transfer = dict(transfer) if isinstance(transfer, dict) else {}
    said = _object(extra.pop(KEY, None), once) | _object(transfer.pop(KEY, None), once)
    said |= _of_evoke(transfer.get(EVOKE), said)
    if transfer or "kv_transfer_params" in extra:
        extra["kv_transfer_params"] = transfer
    return {_plain(name, MAX_NAME): _cut(name, value) for name, value in list(said.items())[:_FEW]}


_FEW: Final = 32  # fields of hints, or of one of its parts; more than there are
_LONG: Final = 4096  # characters of one; chosen, so that any secret fits
_INTEGERS: Final = 1 << 63  # larger integers are sent as floats; chosen, MessagePack ends near
_FLOATS: Final = 1 << 1023  # and from here on not at all: no float is as large


def _cut(name: str, value: Any) -> Any:
    """What of a field travels to the engine: nothing that is longer than anything it may mean, and
    nothing that cannot be encoded on the way."""
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
    """The start of a text, without lone surrogates: they come in through JSON's escapes."""
    return text[:most].encode("utf-8", "replace").decode()


def message_hints(said: dict[str, Any], once: Once) -> list[MessageHint]:
    """The hints about messages, taken out of ``said``."""
    listed = said.pop("messages", None)
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
    segment = {_SEGMENTS_NAME.get(name, name): item[name] for name in _allowed(item, once)}
    if isinstance(layer := item.get("layer"), str) and layer in LAYER_BY_NAME:
        segment["layer"] = layer
    elif item.get("layer") is not None:
        _warn(once, "messages.layer", f"must be one of {', '.join(LAYER_BY_NAME)}")
    if (
        item.get("importance") is None
        and (worth := _priority(item.get("priority"), once)) is not None
    ):
        segment["importance"] = worth
    if isinstance(index, int) and not isinstance(index, bool):
        yield MessageHint(index, None, segment)
    elif isinstance(role, str) and index is None:
        yield MessageHint(None, role, segment)
    else:
        _warn(once, "messages", "must name an index, an integer, or a role")


def _allowed(item: dict[str, Any], once: Once) -> Iterator[str]:
    """The fields of a hint that a segment has, too, and whose values are allowed."""
    for name, read in _READERS.items():
        if item.get(name) is None:
            continue
        try:
            read(item[name])
        except (ValueError, TypeError) as error:
            _warn(once, f"messages.{name}", str(error))
        else:
            yield name


def _priority(value: object, once: Once) -> float | None:
    """A priority from 0 to 100, as an importance."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _FULL:
        _warn(once, "messages.priority", f"must be a number from 0 to {_FULL}")
        return None
    return float(value) / _FULL


def _object(value: object, once: Once) -> dict[str, Any]:
    """Hints as an object, or as the text of one."""
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


def _of_evoke(value: object, said: Mapping[str, Any]) -> dict[str, Any]:
    """The same things as another program calls them: about the last message of a kind."""
    if not isinstance(value, dict) or not _EVOKE_KEYS & value.keys():
        return {}
    found: dict[str, Any] = {}
    if "evoke_session" in value and "session" not in said:
        found["session"] = value["evoke_session"]
    kind = value.get("source_type")
    if isinstance(kind, str) and "messages" not in said:
        hint = {"priority": value["priority"]} if "priority" in value else {}
        if kind in LAYER_BY_NAME:
            hint |= {"index": -1, "layer": kind}
        else:
            hint |= {"role": kind}
        found["messages"] = [hint]
    return found


def _warn(once: Once, field: str, problem: str) -> None:
    once.warn(field, "kvgraph: of a request's hints, %s %s; ignored (said once)", field, problem)


# Marks the layers of a rendered conversation, where its messages are known.

_REMEMBERED: Final = 256  # system texts whose places are known; chosen
_TELLING: Final = 8  # characters of a text whose place is looked for; chosen
_MOST_TYPED: Final = 64  # strings that name special tokens; more are not looked for. Chosen
_DEEPEST: Final = 32  # of lists in lists in a message; chosen

Messages = Sequence[Mapping[str, Any]]


class LayerMarker:
    """Tells which borders of a prompt the template wrote, and which a message brought.

    Args:
        table: The borders of the model's messages.
        tokenizer: vLLM's.
    """

    def __init__(self, table: BorderTable, tokenizer: Any) -> None:
        self._table = table
        self._decode = decoder(tokenizer)
        self._reader = LayerReader(table)
        self._sections = SectionSplitter(table, self._decode)
        names = {self._decode([token]): token for token in sorted(self._reader.first_tokens)}
        known = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._systems: OrderedDict[bytes, _Place] = OrderedDict()

    def runs(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any = None
    ) -> list[Run]:
        """The layers of a prompt.

        Args:
            text: What was tokenized; None if it was not text.
            messages: What was rendered, in their order.
            extras: What else the template was given: tools, and the like.
        """
        try:
            runs = self._marked(tokens, text, messages, extras)
        except TooDeepError:
            runs = None
        return self._sections.split(tokens, self._reader.stream(tokens) if runs is None else runs)

    def _marked(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any
    ) -> list[Run] | None:
        """The same, by the messages; None where only the tokens tell."""
        forged = self._forged(tokens, text, messages, extras)
        if forged is None:
            return None
        has_tools = bool(isinstance(extras, Mapping) and extras.get("tools"))
        runs = _system_first(self._reader.marked(tokens, forged, has_tools))
        return runs if self._table.has_system else self._with_system(tokens, messages, runs)

    def _forged(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any
    ) -> frozenset[int] | None:
        """Where the first token of a border was typed; None where that cannot be told."""
        if self._table.sealed:
            return frozenset()
        if any(self._special.search(each) for each in strings_in(extras)):
            return None
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

    def _spans(self, text: str, messages: Messages) -> list[tuple[int, int]] | None:
        """Where the strings of messages stand in the prompt that name special tokens; None if one
        is not found, or may be the template's: it stands there more often than it was typed."""
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
        """``runs`` where the system text is a part of the first user's turn."""
        system = next((each for each in messages if each.get("role") in _SYSTEM), None)
        content = "\n".join(strings_in(system.get("content"))).strip() if system else ""
        turns = [at for at, run in enumerate(runs) if run.layer == SourceLayer.USER_TURN]
        if not content or not turns:
            return runs
        at = turns[-1 if self._table.system_last else 0]
        run = runs[at]
        start, end = self._place_of(tokens[run.start : run.end], content)
        split = [
            Run(run.layer, run.start, run.start + start),
            Run(int(SourceLayer.RULES), run.start + start, run.start + end),
            Run(run.layer, run.start + end, run.end),
        ]
        return [*runs[:at], *(part for part in split if part.start < part.end), *runs[at + 1 :]]

    def _place_of(self, tokens: Sequence[int], content: str) -> tuple[int, int]:
        """The tokens at whose head ``content`` stands; none where it is not found.

        What is remembered of a text counts while the same tokens stand there: a request may bring
        another template, which writes the text elsewhere.
        """
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
            if len(self._systems) > _REMEMBERED:
                self._systems.popitem(last=False)
        self._systems.move_to_end(key)
        return known.start, known.end


class _Place(NamedTuple):
    """Where a system text stood in the first user's turn: its tokens' places, and their digest."""

    start: int
    end: int
    tokens: bytes


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes()).digest()


_SYSTEM: Final = ("system", "developer")


def _system_first(runs: list[Run]) -> list[Run]:
    """``runs`` with system texts behind the first answer as context: a conversation may have any
    number of them, and only what stands at its head is what a model is."""
    begun, kept = False, []
    for run in runs:
        begun |= run.layer in (SourceLayer.GENERATION, SourceLayer.TOOL_RESULT)
        late = begun and run.layer < SourceLayer.CAPABILITIES
        kept.append(run._replace(layer=int(SourceLayer.CONTEXT)) if late else run)
    return kept


class TooDeepError(ValueError):
    """A message is nested too deeply to be looked through."""


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """All strings in a message, names of fields of nested objects too, in their order.

    Raises:
        TooDeepError: It is nested more than ``_DEEPEST`` deep.
    """
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
    """All strings in messages, and whether each is a content: those stand in a prompt in their
    order. A role or an id may not, while somebody's text names it."""
    for message in messages:
        for name, value in message.items():
            yield from ((string, name == "content") for string in strings_in(value))


def find_string(text: str, string: str, first: int) -> tuple[int, int] | None:
    """Where a string of a message stands in a prompt: as it is, stripped, or as JSON has it."""
    for form in (string, string.strip(), json.dumps(string)[1:-1],
                 json.dumps(string, ensure_ascii=False)[1:-1]):  # fmt: skip
        at = text.find(form, first)
        if at >= 0 and form:
            return at, at + len(form)
    return None


def _inside(spans: list[tuple[int, int]]) -> Callable[[int], bool]:
    """Whether a place is in one of ``spans``, which are disjoint and ascending."""
    starts = [start for start, _ in spans]

    def inside(place: int) -> bool:
        at = bisect_right(starts, place) - 1
        return at >= 0 and place < spans[at][1]

    return inside


# Which tokens of a rendered prompt a client's messages became.

_DEEPEST_PLACE: Final = 4  # of parts in parts; chosen


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
    elif isinstance(content, list | tuple) and depth < _DEEPEST_PLACE:
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


# A chat beside its rendered prompt: what its client says of messages finds their tokens.

CHAT_KEY: Final = "kvgraph_chat"
"""Of a rendered prompt, inside the API process."""

CLIENTS: Final[ContextVar[list[ClientMessage] | None]] = ContextVar("kvgraph_clients", default=None)
"""The messages as their client numbers them, where a surface makes others of them."""


class RenderedChat(NamedTuple):
    """One prompt.

    Attributes:
        marks: Its layers, as they are handed over; None if nobody read them.
        messages: The client's own.
        text: What was tokenized; None: only the tokens are known.
    """

    marks: dict[str, Any] | None
    messages: list[ClientMessage]
    tokens: Sequence[int]
    text: str | None
    tokenizer: Any


def resolved(said: dict[str, Any], chat: RenderedChat | None, once: Once) -> dict[str, Any]:
    """Hints with those about messages turned into segments.

    Args:
        said: All hints of a request; changed.
        chat: None: the request has no messages.
    """
    hints = message_hints(said, once)
    if not hints:
        return said
    if chat is None:
        once.warn("no messages", "kvgraph: a request without messages names some; ignored "
                                 "(said once)")  # fmt: skip
        return said
    segments = said["segments"] if isinstance(said.get("segments"), list) else []
    about = meant(hints, chat.messages)
    if not about:
        once.warn("no such message", "kvgraph: a request's hints name messages that it has not; "
                                     "ignored (said once)")  # fmt: skip
    places = MessagePlaces(chat.tokens, chat.text, chat.tokenizer)
    for place, (at, said_of_it) in zip(places.of(chat.messages, about), about.items(), strict=True):
        if place is None:
            once.warn("not found", "kvgraph: a request's hints name messages that are not found in "
                                   "its prompt; ignored (said once)")  # fmt: skip
        else:
            layer = {"layer": layer_of(chat.messages[at].role)}
            where = {"start": place[0], "end": place[1]}
            room = max(0, MAX_SEGMENTS - len(segments))
            segments += [{**layer, **hint.segment, **where} for hint in said_of_it[:room]]
    if segments:
        said["segments"] = segments
    return said


def meant(
    hints: Sequence[MessageHint], messages: Sequence[ClientMessage]
) -> dict[int, list[MessageHint]]:
    """What is said of messages, by their places among all, in that order; ``MAX_SEGMENTS`` at most,
    however many hints name however many messages."""
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
    """The place of this number, from the end on if it is below 0; none where there is none."""
    return [places[number]] if -len(places) <= number < len(places) else []
