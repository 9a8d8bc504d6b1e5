"""Admission's rows of ``kvgraph status``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...graph.logs.request_facts import Hold
from ...graph.messages.events import HOLD_ENDS
from ...graph.waiting.saturation import AT_EASE, SATURATED
from ..times.spoken_times import seconds

OFF: Final = "nobody waits: admission is off there (AITHER_KVCACHE_ADMISSION)"
"""What is said of an engine that has no report on admission."""


def fit_and_live(fitting: int, live: int) -> str:
    """How many sessions fit, beside how many there are."""
    return f"{fitting:,} agents fit, {live:,} are live"


UNTIL: Final = {
    "room": "until there was room",
    "bound": "as long as any request may be (AITHER_KVCACHE_HOLD_MAX_S)",
    "idle": "until the engine had nothing else to do",
    "open": "until nobody had to wait for room any more",
    "silence": "until the engine heard nothing from the sidecar",
    "gone": "until its client went away",
    "patience": "until no other request was queued, although there was no room",
}
"""What a held request waited for, by why it waited no longer."""


def hold_sentence(hold: Hold) -> str:
    """How long a request was held, and until when."""
    counts = ""
    if hold.live:
        were = "was" if hold.live == 1 else "were"
        counts = f": {_fit(hold.fitting)}, {hold.live:,} {were} live when it came"
    return f"It was held for {seconds(hold.seconds)}, {UNTIL[hold.reason]}{counts}."


def room_sentence(
    now: tuple[int, float],
    sessions: tuple[int | None, int | None],
    lately: tuple[int, float],
    *,
    lifted: bool = False,
) -> str:
    """Who waits for room, and who did.

    Args:
        now: Requests that wait, and for how many seconds the first of them has.
        sessions: How many fit, and how many are live; None: not known.
        lately: Requests that began in the last ten minutes and had waited, and the longest such
            wait in seconds.
        lifted: Whether a limit was lifted because it saved nothing.
    """
    (waiting, oldest_s), (fitting, live), (begun, longest_s) = now, sessions, lately
    said = "Nobody waits for room now"
    said += ", since letting sessions wait saved nothing" if lifted else ""
    if waiting:
        who = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
        first = "" if waiting == 1 else "the first "
        said = f"{who} for room, {first}for {seconds(oldest_s)} by now"
    if fitting is not None and live is not None:
        said += f": {_fit(fitting)}, {live:,} {'is' if live == 1 else 'are'} live"
    if not begun:
        return f"{said}."
    who = "1 request" if begun == 1 else f"{begun:,} requests"
    most = f"of {'' if begun == 1 else 'at most '}{seconds(longest_s)}"
    return f"{said}. {who} of the last 10 min began after a wait for room, {most}."


def admission_facts(engine: Mapping[str, Any]) -> dict[str, str]:
    """An engine's rows of ``kvgraph status``; empty where nobody is or was held, nor would be.

    Args:
        engine: As in a sidecar's ``/status``.
    """
    room, report = engine["room"], (engine["graph"] or {}).get("admission")
    if room is None or (report is None and room["room_blocks"] is None):
        return {}
    facts = {"room": _room(room), "computed again": f"{room['again']:.0%} of the latest prompts"}
    return facts | (_held(report) if report else {"held": OFF})


def _room(room: Mapping[str, Any]) -> str:
    words = fit_and_live(room["fitting_sessions"], room["live_sessions"])
    if room["room_blocks"] is not None:
        return f"for {room['room_blocks']:,} blocks of new context: {words}"
    if room["lifted_pools"]:
        return (
            f"no limit for the next {room['lifted_pools']} pools' worth of prompts, since one "
            f"saved nothing: {words}"
        )
    return f"no limit: {words}"


def _fit(fitting: int) -> str:
    return "1 session fits" if fitting == 1 else f"{fitting:,} sessions fit"


def _held(report: Mapping[str, Any]) -> dict[str, str]:
    now = "nobody"
    if report["waiting"]:
        blocks = report["waiting_blocks"]
        now = f"{report['waiting']:,}, the first for {report['oldest_s']:.0f} s, {blocks:,} blocks"
    ends = zip(HOLD_ENDS, report["released"], strict=False)
    why = ", ".join(f"{name} {count:,}" for name, count in ends if count) or "-"
    total = report["held"] + report["not_held"]
    longest = max(report["longest_s"], report["oldest_s"])
    return {
        "held": now,
        "held so far": f"{report['held']:,} of {total:,}, {longest:.0f} s at most",
        "wait no longer": why,
        "meet a queue": f"{report['queued_share']:.0%} of the latest requests; from "
        f"{SATURATED:.0%} on new ones may wait, and then until it is below {AT_EASE:.0%}",
    }
