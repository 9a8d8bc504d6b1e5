"""``EndpointAccess``: the keys or token with which an engine connects to its sidecar's endpoint. An
ipc socket admits only its owner; a tcp endpoint requires keys or a token.
"""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from pathlib import Path
from typing import Any, Final

import zmq

from ..graph.errors import ConfigError
from ..graph.wire.curve_keys import KEYS_VARIABLE, EngineKeys, load_engine_keys
from ..graph.wire.endpoints import RunningSidecar, is_ipv6, token_of
from ..graph.wire.opener import opener

TOKEN_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR_TOKEN"
_NAME: Final = b"engine"


def engine_keys() -> EngineKeys | None:
    """Return the CURVE keys that the environment names, or None. Raises ConfigError."""
    named = os.environ.get(KEYS_VARIABLE, "").strip()
    try:
        return load_engine_keys(Path(named), zmq.curve_public) if named else None
    except ConfigError as error:
        raise ConfigError(f"{KEYS_VARIABLE}: {error}") from None


class EndpointAccess:
    """Authenticates at one endpoint: by keys if the environment names some, else by a token from
    the environment or the sidecar's runtime file. Raises ConfigError.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._is_tcp = not endpoint.startswith("ipc://")
        self._keys = engine_keys() if self._is_tcp else None  # others at the next connection
        self._token = ""

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Set keys or token on ``socket``, before it connects."""
        if is_ipv6(self._endpoint):
            socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            with contextlib.suppress(ConfigError):  # the old ones may be right
                self._keys = engine_keys() or self._keys
            self._keys.present(socket)
            return
        self._token = self._known_token()
        if self._token:
            socket.setsockopt(zmq.PLAIN_USERNAME, _NAME)
            socket.setsockopt(zmq.PLAIN_PASSWORD, self._token.encode())

    @property
    def may_change(self) -> bool:
        """Return whether a later attempt may succeed where the present one is refused."""
        return self._is_tcp

    def has_changed(self) -> bool:
        """Return whether to connect again: with another token, or keys that may be allowed now."""
        return self._keys is not None or self._known_token() not in ("", self._token)

    def _known_token(self) -> str:
        if not self._is_tcp:
            return ""
        return os.environ.get(TOKEN_VARIABLE, "").strip() or token_of(self._endpoint)


def why_absent(endpoint: str) -> str:
    """Return a hint in brackets at why nobody answers there, or ""; never raises."""
    if not endpoint.startswith("ipc://"):
        known = any(map(os.environ.get, (KEYS_VARIABLE, TOKEN_VARIABLE))) or token_of(endpoint)
        hint = f" (asked without a token; if another user runs the sidecar, set {TOKEN_VARIABLE})"
        return "" if known else hint
    path = endpoint.removeprefix("ipc://")
    try:
        os.stat(path)
        if os.access(path, os.W_OK, effective_ids=True):
            return ""
    except FileNotFoundError:
        return ""
    except OSError:  # its folder cannot be entered
        pass
    return f" (this engine runs as uid {os.geteuid()}, which may not connect to that socket)"


_PATIENCE_S: Final = 2.0  # wait for an answer; chosen
_MOST_BYTES: Final = 16 << 20  # largest answer; chosen


def answer_of(sidecar: RunningSidecar, path: str) -> dict[str, Any]:
    """Return a sidecar's JSON answer for ``path``, authorised with its token. Raises OSError or
    http.client.HTTPException if it does not answer, and ValueError if the answer is no JSON object.
    """
    headers = {"Authorization": f"Bearer {sidecar.token}"}
    request = urllib.request.Request(f"{sidecar.http}{path}", headers=headers)
    with opener(through_proxies=False).open(request, timeout=_PATIENCE_S) as answer:
        try:
            found = json.loads(answer.read(_MOST_BYTES))
        except RecursionError:
            raise ValueError("the sidecar's answer is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("the sidecar's answer is no object")
    return found
