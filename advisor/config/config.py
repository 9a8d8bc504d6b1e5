"""Configuration: a TOML file, the environment, the command line; frozen, and checked once.

Later ones win: defaults < file (``--config`` or ``KVGRAPH_CONFIG``) < environment
(``KVGRAPH_<SECTION>__<KEY>``) < command line. An unknown key or a bad value is a ``ConfigError``
that names the key, the value, where it came from and what is allowed.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ...graph.errors import ConfigError
from ...graph.ipc.addresses import is_loopback
from ...graph.ranking.profile import Rules, ScoreProfile
from .config_errors import explain_errors, unknown_key
from .sections import (
    GraphConfig,
    HttpConfig,
    PolicyConfig,
    PrefetchConfig,
    ScoreConfig,
    SidecarConfig,
    TracingConfig,
)

ENV_PREFIX: Final = "KVGRAPH_"
ENV_CONFIG: Final = "KVGRAPH_CONFIG"


class Config(BaseSettings):
    """Everything that can be configured; one field per section."""

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
        """The rules that bind every policy, for the graph."""
        return self.score.rules(self.prefetch.horizon_s)

    def profile(self) -> ScoreProfile:
        """Weights and rules in one, as the lab takes them."""
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
        """Only what is passed in: ``load`` has merged the layers, so that it can name them."""
        return (init_settings,)


class _Environment(EnvSettingsSource):
    """Reads variables; takes lists as JSON or separated by commas."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            return [item.strip() for item in value.split(",")]


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of file, environment and ``overrides``, checked.

    Args:
        path: The TOML file; None takes the one that ``KVGRAPH_CONFIG`` names, if it does.
        overrides: Dotted keys and values of the command line, e.g. ``{"score.age": "0.02"}``.

    Raises:
        ConfigError: A key or a value is wrong, or the file cannot be read.
    """
    path = path or config_path()
    _check_environment()
    layers = {
        "command line": _nested(overrides or {}),
        "environment": _Environment(Config)(),
        str(path): _read(path) if path else {},
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
    """The file that ``KVGRAPH_CONFIG`` names."""
    named = os.environ.get(ENV_CONFIG)
    return Path(named) if named else None


def check_http(http: HttpConfig) -> None:
    """Refuse to listen beyond loopback unless ``allow_remote`` allows it."""
    if not is_loopback(http.host) and not http.allow_remote:
        raise ConfigError(
            f"http.host = {http.host!r} listens beyond loopback; allowed: 127.0.0.1, or set "
            "http.allow_remote = true if you mean it"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's own, of UTF-8, of numbers, of nesting
        raise ConfigError(f"configuration file {str(path)!r} is not TOML: {error}") from None


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below``, overridden by ``above`` section by section."""
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
    """A list, where the command line writes one as JSON does, as the environment may; else the
    same."""
    try:
        return json.loads(given) if isinstance(given, str) and given.startswith("[") else given
    except ValueError:
        return given  # the section says what it allows


def _check_environment() -> None:
    """Refuse variables of unknown sections, which the settings source would ignore."""
    for name in os.environ:
        section, nested, _ = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if name.startswith(ENV_PREFIX) and nested and section not in Config.model_fields:
            raise unknown_key(section, Config.model_fields, f"environment variable {name}")
