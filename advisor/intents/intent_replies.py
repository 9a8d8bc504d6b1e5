"""Does what ``POST /v1/intents`` asks for, and answers."""

from __future__ import annotations

from ...dashboards.intents.intent_wishes import IntentReply, IntentWish, IntentWishes
from ...graph.intents.intent import Intent, IntentAnswer, IntentKind, Target, Verdict
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.messages.events import SessionSignal


def intent_replies(graph: KVCacheGraph, wishes: IntentWishes) -> list[IntentReply]:
    """One reply for each wish, in their order; the caller holds the graph's lock."""
    graph.changes.all_changed()
    return [_reply(_done(graph, wish)) for wish in wishes.intents]


def _done(graph: KVCacheGraph, wish: IntentWish) -> IntentAnswer:
    if wish.kind == "signal":
        return _signalled(graph, wish)
    target = Target(wish.key, wish.session, wish.identity, wish.memory_id, wish.tenant)
    return graph.intents.apply(Intent(IntentKind(wish.kind), target, wish.seconds, wish.importance))


def _signalled(graph: KVCacheGraph, wish: IntentWish) -> IntentAnswer:
    if wish.session is None:
        return IntentAnswer(Verdict.REJECTED, "a signal is about a session")
    said = SessionSignal(
        wish.session, wish.tenant, wish.waiting_for_tool, wish.expected_return_s,
        wish.session_ended, wish.tool,
    )  # fmt: skip
    return graph.intents.signal(said)


def _reply(answer: IntentAnswer) -> IntentReply:
    return IntentReply(
        answer=answer.verdict,
        reason=answer.reason,
        blocks=answer.blocks,
        asked=answer.asked,
        seconds=answer.seconds,
    )
