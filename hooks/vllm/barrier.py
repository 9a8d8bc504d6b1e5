"""The barrier that no exception of ours crosses into vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class Guarded(Protocol):
    """An object whose entry points are guarded."""

    def disable(self, where: str, error: Exception) -> None:
        """Stop observing after ``error`` in ``where``; must not raise."""


def guarded(default: Any) -> Callable[[Method], Method]:
    """Decorate a method of a ``Guarded``: on any exception disable it and return ``default``."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.disable(method.__name__, error)
                return default

        return cast(Method, call)

    return decorate
