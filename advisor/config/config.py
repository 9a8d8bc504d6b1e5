"""Configuration, validated, then frozen: defaults < file (``--config`` or ``KVGRAPH_CONFIG``) <
environment (``KVGRAPH_<SECTION>__<KEY>``) < command line. A ``ConfigError`` names the key, the
value, where it came from and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ...graph.errors import ConfigError
from ...graph.ranking.policy import Rules, ScoreProfile
from ...graph.wire.endpoints import is_loopback
from .sections import (
    GraphConfig,
    HttpConfig,
    PolicyConfig,
    PrefetchConfig,
    ScoreConfig,
    SidecarConfig,
    TracingConfig,
)

_SECRET: Final = ".token"  # a key whose value is not shown
_LISTS: Final = frozenset({"tuple_type", "list_type", "frozen_set_type"})
_SHOWN: Final = 80  # characters shown of a wrong value; chosen

Layers = Mapping[str, Mapping[str, Any]]  # name, highest priority first → content


def explain_errors(error: ValidationError, model: type[BaseModel], layers: Layers) -> ConfigError:
    """Return the first error in ``error``, as a ConfigError that counts the others."""
    details = error.errors(include_url=False)
    text = _explain(details[0], model, layers)
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return ConfigError(text + more)


def unknown_key(key: str, known: Iterable[str], origin: str) -> ConfigError:
    """Return the error for an unknown ``key``, with the most similar of the ``known`` ones."""
    section, _, name = key.rpartition(".")
    prefix = f"{section}." if section else ""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {prefix}{close[0]}? " if close else ""
    return ConfigError(
        f"unknown key {_shown(key, quote=False)} ({origin}): "
        f"{hint}allowed: {', '.join(sorted(known))}"
    )


def _explain(detail: ErrorDetails, model: type[BaseModel], layers: Layers) -> str:
    path = detail["loc"]
    key = ".".join(map(str, path))
    origin = _origin(path, layers)
    if detail["type"] == "extra_forbidden":
        return str(unknown_key(key, _keys_at(model, path[:-1]), origin))
    if detail["type"] == "missing":
        return f"{key} ({_origin(path[:-1], layers)}): is missing"
    wrong = _lists(model, path) if detail["type"] in _LISTS else _words(detail["msg"])
    value = "'…'" if key.endswith(_SECRET) else _shown(detail["input"])
    return f"{key} = {value} ({origin}): {wrong}"


def _lists(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    if _section_at(model, path) is not None:
        return f"allowed: a table for each, below [[{'.'.join(map(str, path))}]]"
    return 'allowed: a list: ["…", "…"]'


def _words(message: str) -> str:
    told = message.removeprefix("Value error, ").partition(", unable to ")[0]
    told = re.sub(r"^Input is not a valid path.*", "allowed: a path", told)
    told = re.sub(r"^\w+ should (be|have|match) ", "allowed: ", told)
    told = re.sub(r"a valid dictionary.*", "a table", told)
    return told.replace("a valid boolean", "true or false")


def _shown(value: object, quote: bool = True) -> str:
    text = repr(value) if quote else repr(str(value))[1:-1]
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _origin(path: tuple[int | str, ...], layers: Layers) -> str:
    for name, content in layers.items():
        here: Any = content
        for step in path:
            try:
                here = here[step]
            except (KeyError, IndexError, TypeError):
                break
        else:
            return name
    return list(layers)[-1]


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    return list(_section_at(model, path).model_fields)


def _section_at(model: type[BaseModel], path: tuple[int | str, ...]) -> Any:
    section: Any = model
    for step in path:
        if isinstance(step, str):
            section = _section_of(section.model_fields[step].annotation)
    return section


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, getattr(annotation, "__args__", ()))), None)


ENV_PREFIX: Final = "KVGRAPH_"
ENV_CONFIG: Final = "KVGRAPH_CONFIG"


class Config(BaseSettings):
    """The whole configuration; one field per section."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    sidecar: SidecarConfig = SidecarConfig()
    http: HttpConfig = HttpConfig()
    policy: PolicyConfig = PolicyConfig()
    score: ScoreConfig = ScoreConfig()
    graph: GraphConfig = GraphConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    tracing: TracingConfig = TracingConfig()

    def rules(self) -> Rules:
        return self.score.rules(self.prefetch.horizon_s)

    def profile(self) -> ScoreProfile:
        """Weights and rules in one object, for the replay lab."""
        both = (self.score.weights(), self.rules())
        named = {f.name: getattr(each, f.name) for each in both for f in fields(each)}
        return ScoreProfile(**named)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *others: PydanticBaseSettingsSource,
        **more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `load` has merged the layers, so that errors can name them


class _Environment(EnvSettingsSource):
    """Reads variables; lists may be JSON or separated by commas."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            return [item.strip() for item in value.split(",")]


def load(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    text: str | None = None,
) -> Config:
    """Load and validate the configuration.

    Args:
        path: A TOML file; None: the one that ``KVGRAPH_CONFIG`` names, if any.
        overrides: What the command line sets, as in ``{"score.age": "0.02"}``; wins over the
            environment, which wins over the file.
        text: What the file would hold; None: it is read.

    Raises:
        ConfigError: A key or value is wrong; names it, its origin and what is allowed.
    """
    path = path or config_path()
    _check_environment()
    layers = {
        "command line": _nested(overrides or {}),
        "environment": _Environment(Config)(),
        str(path): read_toml(path, text) if path else {},
    }
    merged: dict[str, Any] = {}
    for layer in reversed(layers.values()):
        merged = _overlaid(merged, layer)
    try:
        config = Config(**merged)
    except ValidationError as error:
        raise explain_errors(error, Config, layers) from None
    check_http(config.http)
    return config


def config_path() -> Path | None:
    named = os.environ.get(ENV_CONFIG)
    return Path(named) if named else None


def check_regular(path: Path) -> None:
    """Refuse anything but a regular file: reading a pipe would block. Raises ConfigError."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{str(path)!r} is no regular file, and only such a one is read again")


def check_http(http: HttpConfig) -> None:
    """Refuse to listen beyond loopback unless ``allow_remote`` is set."""
    if not is_loopback(http.host) and not http.allow_remote:
        raise ConfigError(
            f"http.host = {http.host!r} listens beyond loopback; allowed: 127.0.0.1, or set "
            "http.allow_remote = true if you mean it"
        )


def read_toml(path: Path, text: str | None = None) -> dict[str, Any]:
    """The content of a file, or of ``text`` in its place; raises ConfigError."""
    try:
        text = path.read_text("utf-8") if text is None else text
        return tomllib.loads(text.removeprefix("\ufeff"))  # which some editors write
    except OSError as error:
        raise ConfigError(f"configuration file {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's own, of UTF-8, of numbers, of nesting
        raise ConfigError(f"configuration file {str(path)!r} is not TOML: {error}") from None


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _overlaid(old, value)
        merged[key] = value
    return merged


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, given in dotted.items():
        value = _listed(given)
        for step in reversed(key.split(".")):
            value = {step: value}
        nested = _overlaid(nested, value)
    return nested


def _listed(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) and given.startswith("[") else given
    except ValueError:
        return given  # the section says what it allows


_OF_KUBERNETES: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)")
_READ_ELSEWHERE: Final = ("CONFIG", "MEMORY_SECRET")


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Name each variable with our prefix that nothing reads, with the most similar one, except
    those that Kubernetes sets beside a service whose name begins like ours.
    """
    known = [*_READ_ELSEWHERE, *map(str.upper, Config.model_fields)]
    told = []
    for name in sorted(environment):
        own = name.removeprefix(ENV_PREFIX)  # a prefix that all have would make all similar
        if own == name or own.upper().partition("__")[0] in known:
            continue
        service = _OF_KUBERNETES.search(name)
        if service and f"{name[: service.start()]}_SERVICE_HOST" in environment:
            continue
        close = difflib.get_close_matches(own, known, n=1)
        told.append(f"{name} (did you mean {ENV_PREFIX}{close[0]}?)" if close else name)
    return told


def _check_environment() -> None:
    """Refuse variables of unknown sections, or with one underscore behind a section, which the
    settings source would ignore.
    """
    for name in os.environ:
        section, nested, _ = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if name.startswith(ENV_PREFIX) and nested and section not in Config.model_fields:
            raise unknown_key(section, Config.model_fields, f"environment variable {name}")
    for section in Config.model_fields:
        start = (ENV_PREFIX + section).upper()
        # Beside a service that is called kvgraph-http, Kubernetes sets KVGRAPH_HTTP_PORT itself.
        if f"{start}_SERVICE_HOST" in os.environ:
            continue
        for key in map(str.upper, _keys_at(Config, (section,))):
            if f"{start}_{key}" in os.environ:
                raise ConfigError(
                    f"environment variable {start}_{key} is not read: write {start}__{key}"
                )
