"""What can go wrong in a bench that a user can act on."""

from __future__ import annotations

from typing import ClassVar


class BenchError(Exception):
    """Base of them all; the message says what to look at."""

    exit_code: ClassVar[int] = 1  # of the command that ends with it, as in ``kvgraph.graph.errors``


class InputError(BenchError):
    """An option names what does not exist, or cannot be used."""

    exit_code = 2


class ServerError(BenchError):
    """The server did not start, or ended; the message holds the end of its log."""


class CompletionError(BenchError):
    """A request was refused or its connection lost; names it, and the HTTP status or why."""


class TrafficError(BenchError):
    """Recorded sessions cannot be sent as they were asked for; says what would do."""


class AnswerError(BenchError, ValueError):
    """A forced answer is no list of token ids; vLLM answers a ``ValueError`` with HTTP 400."""
