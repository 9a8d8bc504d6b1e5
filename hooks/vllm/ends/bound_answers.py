"""Whether an answer had to have a form, so that its end is not the end of a turn that it chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

_FORMS: Final = ("json_schema", "grammar", "regex", "qwen_xml_parameter")
_SOME: Final = ("triggered_tags", "token_triggered_tags", "tags_with_separator")
"""Kinds of formats whose tags an answer may leave out, unless one at least is required."""


def is_bound(structural_tag: str | None) -> bool:
    """Whether all of an answer, or a call in it, was required.

    Args:
        structural_tag: As vLLM has it, in JSON; None: another kind of form, which binds all of an
            answer. One that cannot be read counts as such.
    """
    if structural_tag is None:
        return True
    try:
        read = msgspec.json.decode(structural_tag, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return True
    form = read.get("format")
    return isinstance(form, Mapping) and _requires(form)  # the older kind allows prose around tags


def _requires(form: Mapping[str, Any]) -> bool:
    """Whether an answer that follows a format has a form, or a call, in any case."""
    kind, parts = form.get("type"), _mappings(form.get("elements"))
    if kind in _FORMS:
        return True
    if kind in _SOME:
        return form.get("at_least_one") is True
    if kind == "sequence":
        return any(map(_requires, parts))
    if kind == "or":
        return bool(parts) and all(map(_requires, parts))
    content = form.get("content")
    return kind in ("tag", "plus") and isinstance(content, Mapping) and _requires(content)


def _mappings(parts: object) -> list[Mapping[str, Any]]:
    return [each for each in parts if isinstance(each, Mapping)] if isinstance(parts, list) else []
