"""Which chat template a server is given on its command line, in place of its model's.

vLLM keeps it out of an engine's configuration, which is where we begin.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

_MARK: Final = "_kvgraph_wrapped"
_GIVEN: Final = "_kvgraph_chat_template"


def remember_templates() -> None:
    """From now on, note the chat template beside the arguments of each engine that has one."""
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs.from_cli_args, _MARK):
        return
    original = EngineArgs.__dict__["from_cli_args"].__func__

    @functools.wraps(original)
    def from_cli_args(cls: type, args: Any) -> Any:
        engine_args = original(cls, args)
        setattr(engine_args, _GIVEN, getattr(args, "chat_template", None))
        return engine_args

    setattr(from_cli_args, _MARK, True)
    EngineArgs.from_cli_args = classmethod(from_cli_args)


def given_template(engine_args: object) -> str | None:
    """The chat template noted beside these arguments: the text of a file, or a text as it is."""
    given = getattr(engine_args, _GIVEN, None)
    if given is None:
        return None
    try:
        return Path(given).read_text("utf-8")
    except (OSError, ValueError):  # it is no file: vLLM takes it for the template itself
        return str(given)
