"""Marks: up to where a reader knows a log, as answers and events carry them.

A mark is ``NAME-NUMBER``. The name is of one log of one sidecar, so that a mark from another
engine's log, or from a sidecar before this one, is told apart.
"""

from __future__ import annotations

from math import inf


def mark_of(name: str, number: int) -> str:
    """The mark of a record; the log's name has no ``-`` in it."""
    return f"{name}-{number}"


def number_in(mark: str, name: str, end: float = inf) -> int | None:
    """The record that a mark of the log ``name`` is of; None where it is no such mark, or the log
    has not come so far: its next record is ``end``."""
    whose, _, number = mark.partition("-")
    is_number = number.isascii() and number.isdigit()
    known = int(number) if whose == name and is_number else None
    return known if known is not None and known < end else None
