"""Marks: up to where a reader knows a log, as answers and events carry them.

A mark is ``NAME-NUMBER``. The name is of one log of one sidecar, so that a mark from another
engine's log, or from a sidecar before this one, is told apart.
"""

from __future__ import annotations


def mark_of(name: str, number: int) -> str:
    """The mark of a record; the log's name has no ``-`` in it."""
    return f"{name}-{number}"


def number_in(mark: str, name: str) -> int | None:
    """The record that a mark of the log ``name`` is of; None where it is no such mark."""
    whose, _, number = mark.partition("-")
    is_ours = whose == name and number.isascii() and number.isdigit()
    return int(number) if is_ours else None
