"""Sequence numbers of one publisher: what is next, what is repeated, what is missing."""

from __future__ import annotations

from enum import Enum


class Arrival(Enum):
    """How a sequence number relates to those before it."""

    NEXT = "next"
    DUPLICATE = "duplicate"  # or reordered: its place has passed
    GAP = "gap"  # at least one number before it never came


class SequenceTracker:
    """Follows one publisher's numbers, which rise by one with each batch.

    Attributes:
        expected: The number that continues the sequence; None accepts any as the first.
        gaps: Times that numbers were missing.
        missed: Numbers that were missing.
        duplicates: Numbers seen again, or too late.
    """

    __slots__ = ("duplicates", "expected", "gaps", "missed")

    def __init__(self, expected: int | None = 0) -> None:
        self.expected = expected
        self.gaps = 0
        self.missed = 0
        self.duplicates = 0

    def classify(self, seq: int) -> Arrival:
        """What ``seq`` is, without taking it."""
        if self.expected is None or seq == self.expected:
            return Arrival.NEXT
        return Arrival.DUPLICATE if seq < self.expected else Arrival.GAP

    def accept(self, seq: int) -> Arrival:
        """Take ``seq``: count what it shows, and expect the number after it."""
        arrival = self.classify(seq)
        if arrival is Arrival.DUPLICATE:
            self.duplicates += 1
            return arrival
        if arrival is Arrival.GAP:
            self.gaps += 1
            self.missed += seq - (self.expected or 0)
        self.expected = seq + 1
        return arrival
