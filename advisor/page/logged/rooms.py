"""Who waits until there is room for its context: now, lately and since an engine's start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ....dashboards.answers.engine_views import AdmissionView, HoldEnd, RoomView
from ....dashboards.source import EngineStatus
from ....graph.logs.request_log import RequestLog
from ....graph.messages.events import HOLD_ENDS, AdmissionReport
from ...admission.wording import UNTIL, admission_facts, room_sentence

_LATELY_S: Final = 600.0  # as long as the second of the first screen's windows


def rooms(log: RequestLog, engines: Iterable[EngineStatus], now: float) -> list[RoomView]:
    """Of engines that hold a request, began one lately that they had held, or may hold none since
    that saved nothing."""
    return [room for each in engines if (room := _room(log, each, now)) is not None]


def _room(log: RequestLog, engine: EngineStatus, now: float) -> RoomView | None:
    report, held = _report(engine), log.held(engine.id, now - _LATELY_S)
    waiting = report.waiting if report is not None else 0
    room = engine.room
    lifted = room is not None and room.lifted_pools > 0
    if not waiting and not len(held) and not lifted:
        return None
    oldest_s = report.oldest_s if report is not None and waiting else 0.0
    fitting = room.fitting_sessions if room is not None else None
    live = room.live_sessions if room is not None else None
    longest_s = float(held.max(initial=0.0))
    return RoomView(
        engine=engine.id,
        waiting=waiting,
        oldest_s=round(oldest_s, 3),
        fitting=fitting,
        live=live,
        begun=len(held),
        longest_s=round(longest_s, 3),
        sentence=room_sentence(
            (waiting, oldest_s), (fitting, live), (len(held), longest_s), lifted=lifted
        ),
    )


def admission_view(engine: EngineStatus, status: dict[str, Any]) -> AdmissionView | None:
    """Whom an engine holds and held since its start; None where it never held anybody.

    Args:
        status: The engine's entry of ``/status``.
    """
    report = _report(engine)
    if report is None or not report.held:
        return None
    ends = zip(HOLD_ENDS, report.released, strict=False)
    facts = admission_facts(status)
    facts.pop("wait no longer", None)  # ``ends`` says that, in words
    return AdmissionView(
        facts=facts,
        ends=[HoldEnd(reason=end, until=UNTIL[end], requests=n) for end, n in ends if n],
    )


def _report(engine: EngineStatus) -> AdmissionReport | None:
    return engine.graph.admission if engine.graph is not None else None
