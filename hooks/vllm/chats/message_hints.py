"""What a client says of its messages: read, checked and cut to what may travel to the engine.

    {"messages": [{"index": 0, "layer": "rules", "identity": "file:policy.md#0", "pinned": 60},
                  {"role": "tool", "priority": 20, "memory_id": "m-17"}]}

stands in ``kv_transfer_params["kvgraph"]``, or in ``vllm_xargs["kvgraph"]`` as one JSON string.
``kv_transfer_params["evoke"]`` is understood, too. Whatever is malformed is left out, with one
warning for each field: a request never fails for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ....graph.messages.fields import MAX_NAME
from ....graph.types import LAYER_BY_NAME
from ...once import Once
from ..hints.hint_values import importance_of, lease_of, name_of
from ..hints.tags import KEY, MAX_SEGMENTS

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
