"""Runs a sidecar as a process: signals, the ready line, the note by which others find it."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from threadpoolctl import threadpool_limits

from ..dashboards.page_tokens import page_address
from ..graph.errors import ConfigError
from ..graph.ipc.runtime import RunningSidecar, RuntimeNote
from .config.config import config_path, load
from .intake import Tap
from .service import Service

logger = logging.getLogger(__name__)


def serve(
    path: Path | None, overrides: Mapping[str, Any], parent: int | None, tap: Tap | None = None
) -> None:
    """Serve until a signal, or until process ``parent`` is gone; raises ConfigError.

    ``tap`` is shown every event (see ``Service``).
    """
    logging.basicConfig(
        level=logging.INFO, format="kvgraph sidecar %(asctime)s %(levelname)s %(message)s"
    )
    # Matrices are small here: more threads would only spin on cores that the engine needs.
    threadpool_limits(1, user_api="blas")
    path = path or config_path()
    service = Service(load(path, overrides), path=path, overrides=overrides, parent=parent, tap=tap)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    signal.signal(signal.SIGHUP, lambda *_: service.reload())
    note = leave_note(service)
    typer.echo(ready_line(service, machine=parent is not None))
    try:
        service.run()
    finally:
        if note is not None:
            note.remove()


def leave_note(service: Service) -> RuntimeNote | None:
    running = RunningSidecar(os.getpid(), service.endpoint, service.http, service.token)
    try:
        return RuntimeNote.write(running)
    except (ConfigError, OSError) as error:
        logger.warning("`kvgraph status` will not find this sidecar by itself: %s", error)
        return None


def ready_line(service: Service, *, machine: bool) -> str:
    page = page_address(service.http, service.token)
    if not machine:
        return (
            f"kvgraph is ready at {service.http}. Start engines with AITHER_KVCACHE_GRAPH=1 "
            f"AITHER_KVCACHE_SIDECAR={service.endpoint}; watch it at {page}; Ctrl-C ends it."
        )
    ready = {"ready": True, "pid": os.getpid(), "endpoint": service.endpoint, "http": service.http}
    return json.dumps({**ready, "page": page})
