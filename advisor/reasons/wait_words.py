"""What a request waited for, and what would have let it begin sooner: in sentences."""

from __future__ import annotations

_MUCH_AGAIN = 0.25  # share of what was computed before it; chosen


def wait_sentence(prompts: int, tokens: int, again: int, who: str | None, most: int) -> str:
    """What the engine did while a request waited.

    Args:
        prompts: That were begun before it.
        tokens: That were computed for these.
        again: Of these tokens: how many had been in the engine's pool before.
        who: Whose prompt took most; None: nothing was computed.
        most: Tokens that were computed for that one.
    """
    if not tokens:
        return (
            "While it waited, no other prompt was begun: the engine computed an earlier one, or "
            "was full of answers under way."
        )
    others = "one other prompt" if prompts == 1 else f"{prompts:,} other prompts"
    said = f"While it waited, the engine began {others} and computed {tokens:,} tokens of them"
    if again:
        said += f", {_percent(again, tokens)} of which it had held before"
    return f"{said}. The largest was {who}'s: {most:,} tokens."


def wait_remedy(tokens: int, again: int) -> str:
    """What would have let it begin sooner; arguments as above."""
    if tokens and again >= _MUCH_AGAIN * tokens:
        return (
            "Keeping what the prompts before it computed again: a larger pool, or host memory for "
            "copies (AITHER_KVCACHE_WARM_GIB); What if shows how much they would find."
        )
    return (
        "Fewer requests at once, or another engine (`kvgraph route`): little of what was computed "
        "before it had been there."
    )


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "less than 1 %"
