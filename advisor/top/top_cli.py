"""``kvgraph top``: draws what a ``Watcher`` sees until a key ends it."""

from __future__ import annotations

import json
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from .keyboard import HUNG_UP, Keyboard
from .top_screen import top_screen
from .watched import Watcher

_KEY_WITHIN_S: Final = 0.1  # a pause in which a key is felt as prompt; chosen
_QUITS: Final = ("q", "Q", "\x1b", HUNG_UP)


def top(
    url: Annotated[
        str | None, typer.Option(help="A sidecar's URL; without it, those running.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
) -> None:
    """Show live whether kvgraph helps; `q` ends it. In a pipe, one look is printed."""
    watcher, console = Watcher(url, interval), Console()
    watcher.first_look()
    if as_json:
        seen = [{"url": w.url, "now": w.now, "misses": w.misses} for w in watcher.latest]
        typer.echo(json.dumps(seen))
    elif once or not console.is_terminal:
        console.print(top_screen(watcher.latest))
    else:
        _follow(watcher, console)


def _follow(watcher: Watcher, console: Console) -> None:
    """Draw each look in the place of the one before."""
    watcher.start()
    drawn = 0, console.size
    try:
        with (
            Keyboard() as keyboard,
            Live(top_screen(watcher.latest), console=console, screen=True, auto_refresh=False)
            as live,
        ):  # fmt: skip
            while keyboard.pressed(_KEY_WITHIN_S) not in _QUITS:
                if drawn != (watcher.looks, console.size):
                    drawn = watcher.looks, console.size
                    live.update(top_screen(watcher.latest), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        watcher.stop()
