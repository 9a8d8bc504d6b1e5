"""Where traces go, by the configuration or by OpenTelemetry's own variables."""

from __future__ import annotations

import logging
import os
from typing import Final

from ...graph.errors import ConfigError
from ..config.sections import TracingConfig
from .span_feed import Sender

logger = logging.getLogger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OURS: Final = "http/protobuf"
_PATH: Final = "/v1/traces"  # of OTLP/HTTP, below a base address
_INSTALL: Final = "pip install 'kvgraph[otel]'"


def sender_for(config: TracingConfig) -> Sender | None:
    """What sends traces; None where no endpoint is set, or OpenTelemetry is switched off.

    Variables may have been set for the engine that started the sidecar: what they ask for and
    cannot be had is told in the log. What our own configuration asks for must be there.

    Raises:
        ConfigError: ``tracing.endpoint`` is set, and OpenTelemetry is not installed.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if config.endpoint is not None:
        return _configured(config.endpoint)
    named = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    return None if named is None else _by_variable(named)


def _configured(endpoint: str) -> Sender:
    try:
        return _sender(_with_path(endpoint))
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint = {endpoint!r} needs OpenTelemetry ({error}): {_INSTALL}"
        ) from None


def _by_variable(named: str) -> Sender | None:
    spoken = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _OURS)
    if spoken != _OURS:
        logger.warning("%s is set for the protocol %s: the sidecar sends traces by %s only, and "
                       "sends none", named, spoken, _OURS)  # fmt: skip
        return None
    try:
        return _sender(None)
    except ImportError as error:
        logger.warning("%s is set, but OpenTelemetry is not installed (%s): no traces are sent; %s",
                       named, error, _INSTALL)  # fmt: skip
        return None


def _sender(url: str | None) -> Sender:
    from .otlp_sender import OtlpSender  # loads OpenTelemetry

    return OtlpSender(url)


def _with_path(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH
