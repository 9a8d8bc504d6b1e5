"""Asks a running sidecar of this user over HTTP, on loopback, past any proxy."""

from __future__ import annotations

import json
import urllib.request
from typing import Any, Final

from ..graph.ipc.runtime import RunningSidecar

_PATIENCE_S: Final = 2.0  # for an answer; chosen
_MOST_BYTES: Final = 16 << 20  # of an answer; chosen


def answer_of(sidecar: RunningSidecar, path: str) -> dict[str, Any]:
    """What ``sidecar`` answers for ``path``, asked with its token.

    Raises:
        OSError, http.client.HTTPException: It does not answer.
        ValueError: It answers something else than an object.
    """
    headers = {"Authorization": f"Bearer {sidecar.token}"}
    request = urllib.request.Request(f"{sidecar.http}{path}", headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=_PATIENCE_S) as answer:
        try:
            found = json.loads(answer.read(_MOST_BYTES))
        except RecursionError:
            raise ValueError("the sidecar's answer is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("the sidecar's answer is no object")
    return found
