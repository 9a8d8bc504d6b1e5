"""Sets values in the text of a TOML file, and leaves all else as a person wrote it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any


def with_values(text: str, section: str, values: Mapping[str, Any]) -> str:
    """A file's text with these keys of a section set.

    All else stays as it was: comments, also behind a value that changes, and line ends. Only
    comments between the items of an array go with the array.

    Raises:
        tomllib.TOMLDecodeError: The text is not TOML.
    """
    ending = "\r\n" if "\r\n" in text else "\n"
    if text and not text.endswith("\n"):
        text += ending
    found = list(_statements(text))
    first, end = _span(found, section)
    if first is None:
        found += [ending] if found else []
        found.append(f"[{section}]{ending}")
        first = end = len(found)
    for key, value in values.items():
        at = next((n for n in range(first, end) if _sets(found[n], key)), None)
        if at is None:
            found.insert(end, f"{key} = {_toml(value)}{ending}")
            end += 1
        else:
            found[at] = f"{_indent(found[at])}{key} = {_toml(value)}{_tail(found[at])}"
    return "".join(found)


def _statements(text: str) -> Iterator[str]:
    """The lines of a text, each with its end; those that one value spans are one."""
    tomllib.loads(text)
    begun = ""
    # Not splitlines: it also breaks at characters that TOML allows inside a comment.
    for line in re.findall(r"[^\n]*\n", text):
        begun += line
        if _is_whole(begun):
            yield begun
            begun = ""


def _is_whole(statement: str) -> bool:
    try:
        tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _span(found: list[str], section: str) -> tuple[int | None, int]:
    """The statements of a section, behind its header, without empty ones at its end."""
    header = re.compile(rf"\s*\[\s*{re.escape(section)}\s*\]\s*(#.*)?$")
    at = next((n for n, statement in enumerate(found) if header.match(statement)), None)
    if at is None:
        return None, len(found)
    later = range(at + 1, len(found))
    end = next((n for n in later if found[n].lstrip().startswith("[")), len(found))
    while end > at + 1 and not found[end - 1].strip():
        end -= 1
    return at + 1, end


def _sets(statement: str, key: str) -> bool:
    return key in tomllib.loads(statement)


def _indent(statement: str) -> str:
    return statement[: len(statement) - len(statement.lstrip())]


def _tail(statement: str) -> str:
    """What stands behind the value: blanks, a comment, the line's end."""
    ends = [at for at, sign in enumerate(statement) if sign == "#"]
    end = next((at for at in ends if _is_whole(statement[:at])), len(statement))
    return statement[len(statement[:end].rstrip()) :]


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(float(value))
