"""What chats remember beyond their budget, through ``kvgraph memory`` and a real engine."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvgraph.advisor.memory.settings import MemorySettings, Mode

from ..recall.recall_language import ASK, FACT, KEYS, NOISE, SAID, VALUES
from .memory_stage import LONGEST, Answered, Chat, memory_before

WORD: Final = (
    "t"  # what the words of the model that remembers begin with: its tokens' numbers follow
)
_NOISE: Final = 18  # words around a fact; chosen: all of a chat fits into what the model was taught
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """A chat before its questions: the user's messages, each with a fact, a key and its value."""

    messages: list[str]
    keys: list[int]
    values: list[list[int]]

    def question(self, at: int) -> str:
        """Asks for what the message ``at`` told."""
        return said([ASK, self.keys[at]])

    def answer(self, at: int) -> list[str]:
        return said(self.values[at]).split()


def tell(turns: int, rng: random.Random, noise: int = _NOISE) -> Told:
    """A chat of ``turns`` messages, ``noise`` words around each fact; later keys replace."""
    keys = rng.sample(range(*KEYS), min(turns, KEYS[1] - KEYS[0]))
    keys += rng.choices(keys[len(keys) // 2 :], k=turns - len(keys))
    values = [[rng.randrange(*VALUES) for _ in range(SAID)] for _ in keys]
    texts = [_message(*each, noise, rng) for each in zip(keys, values, strict=True)]
    return Told(texts, keys, values)


def said(tokens: list[int]) -> str:
    return " ".join(f"{WORD}{token}" for token in tokens)


def noise_of(words: int, rng: random.Random) -> list[int]:
    return [rng.randrange(*NOISE) for _ in range(words)]


def _message(key: int, values: list[int], noise: int, rng: random.Random) -> str:
    words = noise_of(noise, rng)
    half = noise // 2
    return said([*words[:half], FACT, key, *values, *words[half:]])


TURNS: Final = 14  # of a chat with several facts: all of it fits into what the model was taught
FACTS: Final = 5
BUDGETS: Final = (182, 104, 64)  # tokens: 2, 3.5 and 5.7 × less than the chat
PLANTED_TURNS: Final = 24
PLANTED_BUDGET: Final = 256
SECTIONS: Final = 150
WALL_BUDGET: Final = 384  # the sections have ten times as many tokens
_REFERENCES: Final = 20  # sections of the wall that are spoken of again
CODING_BUDGET: Final = 256  # its files alone have 2.3 times as many tokens
_FILES: Final = 12  # of the coding session
_FILE_NOISE: Final = 43  # words of a file around its fact; chosen: files are what a session holds
_RULES: Final = 40  # words of the coding session's system message
_STEPS: Final = 40
_ASKED_AGAIN: Final = 8  # blocks that may come back in it
_OWN: Final = MemorySettings(LONGEST, sinks=0, top=1, shortest=16)  # as the engine's limits


@dataclass
class Outcome:
    """An arm's ``right`` answers, wall times, tokens by the engine's count, and blocks moved."""

    right: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    seen: Answered = field(default_factory=Answered)
    evicted: int = 0
    recalled: int = 0
    mismatches: int = 0


def arm(mode: Mode, budget: int, **more: Any) -> MemorySettings:
    return replace(_OWN, mode=mode, budget=budget, **more)


FULL: Final = arm(Mode.DISCARD, LONGEST, high=1.0, low=1.0)


async def several_facts(
    url: str, by: MemorySettings, sessions: int, seed: int, recall: bool = True
) -> Outcome:
    """Chats that tell a fact a turn; then five of their first half are asked for. ``recall``: the
    engine may bring text back; else it computes the same prompts.
    """
    rng, found = random.Random(seed), Outcome()
    async with memory_before(url, by) as memory:
        for number in range(sessions):
            told = tell(TURNS, rng)
            chat = memory.chat(f"several-{by.mode}-{by.budget}-{number}", recall)
            for text in told.messages:
                await chat.say(_user(text))
            for at in rng.sample(range(TURNS // 2 + 1), FACTS):
                words = await chat.say(_user(told.question(at)), keeps=False)
                found.right.append(words == told.answer(at))
            _add(found.seen, chat.seen)
        _count(found, memory)
    return found


async def planted(
    url: str, ways: Sequence[MemorySettings], sessions: int, seed: int, word: str = WORD
) -> list[Outcome]:
    """Chats of many turns; the fact of the second one is asked for at the end.

    Each chat is held in all ways, one after the other, and the ways take turns at going first: what
    else the machine does is the same for all.

    Args:
        word: What the model's words begin with.
    """
    rng, found = random.Random(seed), [Outcome() for _ in ways]
    async with contextlib.AsyncExitStack() as stack:
        memories = [await stack.enter_async_context(memory_before(url, by)) for by in ways]
        for number in range(sessions):
            told = tell(PLANTED_TURNS, rng)
            for at in range(len(ways)):
                way = (at + number) % len(ways)
                chat = memories[way].chat(f"planted-{ways[way].mode}-{number}")
                await _plant(found[way], chat, told, word)
        for outcome, memory in zip(found, memories, strict=True):
            _count(outcome, memory)
    return found


async def _plant(found: Outcome, chat: Chat, told: Told, word: str) -> None:
    began = time.perf_counter()
    for text in told.messages:
        await chat.say(_user(text.replace(WORD, word)))
    words = await chat.say(_user(told.question(1).replace(WORD, word)))
    found.seconds.append(time.perf_counter() - began)
    found.right.append(words == told.answer(1))
    _add(found.seen, chat.seen)


async def wall(url: str, by: MemorySettings, seed: int) -> Outcome:
    """One chat of 150 sections; then twenty of its first are spoken of again."""
    rng, found = random.Random(seed), Outcome()
    told: Told = tell(SECTIONS, rng)
    async with memory_before(url, by) as memory:
        chat = memory.chat(f"wall-{by.mode}")
        for text in told.messages:
            await chat.say(_user(text))
        for at in range(_REFERENCES):  # of keys that are told once
            words = await chat.say(_user(told.question(at)), keeps=False)
            found.right.append(words == told.answer(at))
        _add(found.seen, chat.seen)
        _count(found, memory)
    return found


async def coding(url: str, by: MemorySettings, seed: int) -> Outcome:
    """A session that reads files and returns to them; its client says what the assistant called.

    A mismatch is a block that came back and does not say what its file said then. Questions are
    asked again, and are then most like themselves: several blocks may come back.
    """
    rng, found = random.Random(seed), Outcome()
    told, read = tell(_FILES, rng, _FILE_NOISE), dict[str, str]()
    async with memory_before(url, replace(by, top=_ASKED_AGAIN)) as memory:
        chat = memory.chat(f"coding-{by.mode}")
        chat.messages = [{"role": "system", "content": said(noise_of(_RULES, rng))}]
        for step in range(_STEPS):
            file = step if step < _FILES else rng.randrange(_FILES)
            if step < _FILES:
                await chat.say(_user(said([3, file + 4])))
                read[f"file:f{file}.py#0"] = told.messages[file]
                chat.messages[-1:] = _reading(file, told.messages[file])
            words = await chat.say(_user(told.question(file)))
            found.right.append(words == told.answer(file))
        kept = {block.name: block.messages[-1]["content"] for block in memory.blocks()}
        back = [name for name in chat.seen.recalled if name.startswith("file:")]
        found.mismatches = sum(kept[name] != read[name] for name in back)
        _add(found.seen, chat.seen)
        _count(found, memory)
    return found


def _reading(file: int, text: str) -> list[dict[str, Any]]:
    arguments = f'{{"path": "f{file}.py"}}'
    call = {"id": f"c{file}", "type": "function",
            "function": {"name": "read", "arguments": arguments}}  # fmt: skip
    return [{"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{file}", "content": text}]  # fmt: skip


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _add(total: Answered, more: Answered) -> None:
    total.prompt += more.prompt
    total.spliced += more.spliced
    total.decoded += more.decoded
    total.peak = max(total.peak, more.peak)
    total.recalled += more.recalled


def _count(found: Outcome, memory: Any) -> None:
    found.evicted, found.recalled = memory.proxy.counts.evicted, memory.proxy.counts.recalled
