"""The configuration file of ``kvgraph precache``: a server, and the prefixes to compute on it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...graph.errors import ConfigError
from ..config.config import check_regular, explain_errors, read_toml
from ..config.edits import read_whole

Message = dict[str, Any]
# Makes the messages of a turn from its variables; all text before the mark must be stable.
Render = Callable[[Mapping[str, str]], Sequence[Message]]

NOTHING: Final = "."  # text of a warming request's last message, in place of a user's


def stable_messages(render: Render, drop_from: str, variables: Mapping[str, str]) -> list[Message]:
    """Return the messages before the mark ``drop_from``; the one that contains it is cut there.

    The renderer of real turns also renders this, so that both start with the same bytes. Raises
    ConfigError.
    """
    kept: list[Message] = []
    for message in as_messages(render({**variables, "drop_from": drop_from})):
        content = message.get("content")
        if isinstance(content, str) and drop_from in content:
            before = content[: content.index(drop_from)]
            return [*kept, {**message, "content": before}] if before else kept
        kept.append(message)
    raise ConfigError(f"drop_from = {drop_from!r}: no message holds it")


def as_messages(made: object, what: str = "messages") -> list[Message]:
    """Return ``made`` as a list of JSON objects; raises ConfigError, which names it ``what``."""
    if not isinstance(made, list | tuple):
        raise ConfigError(f"{what}: {type(made).__name__!r}; allowed: a list of objects")
    for number, each in enumerate(made):
        if not isinstance(each, Mapping):
            kind = type(each).__name__
            raise ConfigError(f"{what}[{number}]: {kind!r}; allowed: an object")
        try:
            json.dumps(each)
        except (TypeError, ValueError, RecursionError) as error:  # a date, a circle
            raise ConfigError(f"{what}[{number}] holds what JSON cannot: {error}") from None
    return [dict(each) for each in made]


def warming_messages(stable: Sequence[Message]) -> list[Message]:
    """Return the messages to send for a prefix; templates require a user's message at the end."""
    if stable and stable[-1].get("role") == "user":
        return [*stable]
    return [*stable, {"role": "user", "content": NOTHING}]


def renderer(name: str, directory: Path) -> Render:
    """Return the function that ``FILE.py:FUNCTION`` names, relative to ``directory``."""
    file, _, function = name.rpartition(":")
    path = directory / file
    spec = importlib.util.spec_from_file_location(path.stem, path) if file else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"render = {name!r}: allowed: FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever an application's file does
        raise ConfigError(f"render = {name!r}: {path}: {type(error).__name__}: {error}") from None
    found: Render | None = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"render = {name!r}: {path} has no function {function!r}")
    return found


SYSTEM_PREFIX: Final = "conv:__system_prefix__"  # key of a system prefix without a conversation


def prefix_key(conversation: str) -> str:
    return f"conv:{conversation}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


TTL_S: Final = {"5m": 300.0, "60m": 3600.0, "24h": 86_400.0}
SWEEP_S: Final = 240.0
LEAST_SWEEP_S: Final = 30.0

HttpUrl = Annotated[str, Field(max_length=2048, pattern=r"^https?://[^\s/]+(/\S*)?$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerConfig(_Section):
    """The server that computes prefixes.

    Attributes:
        url: An OpenAI-compatible API, with its ``/v1``.
        model: The model's name there; empty for the first that the server lists.
        key_variable: The environment variable that holds the API key.
        timeout_s: Seconds to wait for an answer.
    """

    url: HttpUrl = "http://127.0.0.1:8000/v1"
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0

    @property
    def key(self) -> str:
        return os.environ.get(self.key_variable, "") or "none"


class PrefixConfig(_Section):
    """One prefix.

    Attributes:
        conversation: The conversation that it belongs to; without one, its key is derived from its
            texts.
        system: The system text, or ``file:PATH`` of it, relative to the TOML file.
        messages: The messages after it.
        render: Instead of both, ``FILE.py:FUNCTION`` relative to the TOML file; the function makes
            the messages of a turn, given the mark as ``drop_from``.
        tools: Tools of the requests that begin with it.
        drop_from: The mark from which rendered text is dropped; empty if all of it is stable.
        ttl: How long the server is expected to keep it.
    """

    conversation: str = ""
    system: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    render: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    drop_from: str = ""
    ttl: Literal["5m", "60m", "24h"] = "60m"

    @model_validator(mode="after")
    def _says_something(self) -> PrefixConfig:
        if not self.system and not self.messages and not self.render:
            raise ValueError("has neither system nor messages; allowed: one of them, or both")
        if self.render and (self.system or self.messages or not self.drop_from):
            raise ValueError("render stands for system and messages, and wants drop_from")
        try:
            as_messages(self.messages)
            as_messages(self.tools, "tools")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def seconds(self) -> float:
        return TTL_S[self.ttl]

    def stable(self, directory: Path) -> list[Message]:
        if self.render:
            return stable_messages(renderer(self.render, directory), self.drop_from, {})
        head = [{"role": "system", "content": _text(self.system, directory)}] if self.system else []
        whole = [*head, *map(dict, self.messages)]
        if not self.drop_from:
            return whole
        return stable_messages(lambda _: whole, self.drop_from, {})

    def key(self, directory: Path) -> str:
        """Return its key: from its conversation, its tools, its texts, or all of its messages."""
        if self.conversation:
            return prefix_key(self.conversation)
        stable = self.stable(directory)
        if self.tools:
            whole = json.dumps({"messages": stable, "tools": self.tools}, sort_keys=True)
            return f"v5:{uuid.uuid5(uuid.NAMESPACE_OID, whole)}"
        if not self.messages and not self.render:
            return SYSTEM_PREFIX
        texts = [message.get("content", "") for message in stable]
        if all(isinstance(text, str) for text in texts):
            return f"seg:{_digest(json.dumps(texts))}"
        return f"pfx:{_digest(json.dumps(stable, sort_keys=True))}"


class PrecacheConfig(_Section):
    """The whole file.

    Attributes:
        sweep_s: Seconds between two sweeps.
        pin: Whether a sidecar may be asked to lease a prefix that is still cached, instead of
            sending a request.
    """

    server: ServerConfig = ServerConfig()
    prefix: Annotated[tuple[PrefixConfig, ...], Field(min_length=1)]
    sweep_s: Annotated[float, Field(ge=LEAST_SWEEP_S, le=86_400)] = SWEEP_S
    pin: bool = True


def read_precache(path: Path) -> PrecacheConfig:
    """Read and check the file; a ConfigError names the key that is wrong, and what is allowed."""
    check_regular(path)
    text = read_whole(path)
    if not text:
        raise ConfigError(f"{path}: there is no such file, or it is empty")
    return _checked(PrecacheConfig, read_toml(path, text), str(path))


def new_prefix(**fields: Any) -> PrefixConfig:
    """Return an application's prefix, checked like one from a file."""
    return _checked(PrefixConfig, fields, "a prefix")


_S = TypeVar("_S", bound=_Section)


def _checked(section: type[_S], content: dict[str, Any], origin: str) -> _S:
    try:
        return section.model_validate(content)
    except ValidationError as error:
        raise explain_errors(error, section, {origin: content}) from None


def _text(text: str, directory: Path) -> str:
    if not text.startswith("file:"):
        return text
    path = directory / text.removeprefix("file:")
    found = ""
    if "\0" not in text:
        check_regular(path)
        found = read_whole(path)
    if not found:
        raise ConfigError(f"system = {text!r}: {path} cannot be read, or is empty")
    return found
