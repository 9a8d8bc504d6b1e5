"""How models of different families write tool calls, apart from their chat templates.

Each writer takes the calls of one answer, and whether JSON is written without spaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A tool call."""

    name: str
    arguments: dict[str, Any]


Writer = Callable[[Sequence[Call], bool], str]


def _json(value: object, dense: bool) -> str:
    separators = (",", ":") if dense else (", ", ": ")
    return json.dumps(value, separators=separators, ensure_ascii=False)


def hermes(calls: Sequence[Call], dense: bool) -> str:
    """A JSON object between two tags."""
    bodies = [_json({"name": c.name, "arguments": c.arguments}, dense) for c in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen_coder(calls: Sequence[Call], dense: bool) -> str:
    """A tag for each function and for each parameter."""
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items()
        )
        + "</function>\n</tool_call>"
        for call in calls
    )


def llama(calls: Sequence[Call], dense: bool) -> str:
    """A bare JSON object, one for an answer."""
    return _json({"name": calls[0].name, "parameters": calls[0].arguments}, dense)


def pythonic(calls: Sequence[Call], dense: bool) -> str:
    """A list of Python calls."""
    comma = "," if dense else ", "
    bodies = [
        f"{call.name}({comma.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    ]
    return f"[{comma.join(bodies)}]"


def mistral(calls: Sequence[Call], dense: bool) -> str:
    """A JSON list behind one token."""
    listed = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return "[TOOL_CALLS]" + ("" if dense else " ") + _json(listed, dense)


def deepseek(calls: Sequence[Call], dense: bool) -> str:
    """A code block between tokens."""
    bodies = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        f"{_json(call.arguments, dense)}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(bodies) + "<｜tool▁calls▁end｜>"


def dsml(calls: Sequence[Call], dense: bool) -> str:
    """Tags that are half a token."""
    bodies = [
        f'<｜DSML｜invoke name="{call.name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n'
            for key, value in call.arguments.items()
        )
        + "</｜DSML｜invoke>"
        for call in calls
    ]
    return "<｜DSML｜function_calls>\n" + "\n".join(bodies) + "\n</｜DSML｜function_calls>"


def phi(calls: Sequence[Call], dense: bool) -> str:
    """A JSON list between two tokens."""
    listed = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return f"<|tool_call|>{_json(listed, dense)}<|/tool_call|>"


def harmony(calls: Sequence[Call], dense: bool) -> str:
    """A message to a function, on a channel of its own."""
    body = _json(calls[0].arguments, dense)
    thought = "<|channel|>analysis<|message|>The user wants this done.<|end|><|start|>assistant"
    head = f"<|channel|>commentary to=functions.{calls[0].name} <|constrain|>json<|message|>"
    return thought + head + body


def glm(calls: Sequence[Call], dense: bool) -> str:
    """Tags for keys and values."""
    return "\n".join(
        f"<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def kimi(calls: Sequence[Call], dense: bool) -> str:
    """Numbered functions between tokens."""
    bodies = [
        f"<|tool_call_begin|>functions.{call.name}:{number}<|tool_call_argument_begin|>"
        f"{_json(call.arguments, dense)}<|tool_call_end|>"
        for number, call in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(bodies) + "<|tool_calls_section_end|>"


def granite(calls: Sequence[Call], dense: bool) -> str:
    """A JSON list behind one token, and nothing behind it."""
    listed = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return "<|tool_call|>" + _json(listed, dense)


def gemma(calls: Sequence[Call], dense: bool) -> str:
    """Values between tokens."""
    return "".join(
        f"<start_function_call>call:{call.name}{{"
        + ",".join(f"{key}:<escape>{value}<escape>" for key, value in call.arguments.items())
        + "}<end_function_call>"
        for call in calls
    )
