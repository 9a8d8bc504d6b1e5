"""``kvgraph …`` without a process of its own, which takes a second of CPU time to start."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Mapping
from unittest import mock

from kvgraph.advisor.cli import main


def kvgraph(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; what it printed, and its exit status, as of a process."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    variables = dict(os.environ if environment is None else environment)
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
