"""Why answers end, read off tokens that are words: what counts is where an answer ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvgraph.hooks.requests.ends import END_OF_TURN, UNKNOWN, AnswerReader, Ending, EndMarks


class Words:
    """A tokenizer of which each word is a token; it counts what it decodes."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self.decoded = 0

    def token(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)

    def tokens(self, text: str) -> list[int]:
        return [self.token(word) for word in text.split(" ")]

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        return " ".join(self._words[token] for token in tokens)


WORDS = Words()
END, EOM = WORDS.token("<end>"), WORDS.token("<eom>")
TAGGED = EndMarks(
    turn_ends=(END,), opener=WORDS.token("<call>"), before=' {"name": "', after='"',
    closers=("</call>",),
)  # fmt: skip
BARE = EndMarks(turn_ends=(END,), before='{"name": "', after='", "args":', closers=("}",))
LISTED = EndMarks(
    turn_ends=(END,), opener=WORDS.token("[CALLS]"), before='[{"name": "', after='", "args":',
    closers=("]",),
)  # fmt: skip
TEXTUAL = EndMarks(turn_ends=(END,), before="to=functions.", after="<", closers=("<|call|>",))
BY_TOKEN = EndMarks(turn_ends=(END,), call_ends=(EOM,))


def read(marks: EndMarks, text: str) -> Ending:
    return AnswerReader(marks, WORDS.decode).read(WORDS.tokens(text))


@pytest.mark.parametrize(
    ("marks", "text", "ending"),
    [
        (TAGGED, 'Sure. <call> {"name": "bash", "args": {}} </call> <end>', Ending(True, "bash")),
        (TAGGED, '<call> {"name":"bash"} </call> \n <end>', Ending(True, "bash")),
        (TAGGED, '<call> {"name": "bash"} </call>', Ending(True, "bash")),
        (TAGGED, 'A call is <call> {"name": "bash"} </call> as you see. <end>', END_OF_TURN),
        (TAGGED, "It ends with </call> <end>", END_OF_TURN),
        (TAGGED, "<call> nothing </call> <end>", Ending(True, None)),
        (TAGGED, '<call> {"name": "my secret text"} </call> <end>', Ending(True, None)),
        (TAGGED, "Done. <end>", END_OF_TURN),
        (TAGGED, "<end>", END_OF_TURN),
        (TAGGED, "Stopped by a word of the caller's", UNKNOWN),
        (BARE, '{"name": "bash", "args": {"a": "}"}} <end>', Ending(True, "bash")),
        (BARE, '{"name": "Bob", "age": {}} <end>', END_OF_TURN),
        (BARE, '{"name": "bash", "args": {}} is a call, {so it is} <end>', END_OF_TURN),
        (BARE, 'See {"name": "bash", "args": {}} <end>', END_OF_TURN),
        (LISTED, '[CALLS] [{"name": "bash", "args": {}}] <end>', Ending(True, "bash")),
        (LISTED, '[CALLS] [{"name": "bash", "args": {}}] , see [1] <end>', END_OF_TURN),
        (TEXTUAL, "Thoughts. to=functions.bash <json> {} <|call|>", Ending(True, "bash")),
        (TEXTUAL, "to=functions.bash <json> {} <|call|> was said. <end>", END_OF_TURN),
        (BY_TOKEN, "anything <eom>", Ending(True, None)),
        (BY_TOKEN, "anything <eom> else <end>", END_OF_TURN),
    ],
)  # fmt: skip
def test_an_answer_is_read_by_where_it_ends(marks: EndMarks, text: str, ending: Ending) -> None:
    assert read(marks, text) == ending


def test_of_several_calls_the_first_is_named() -> None:
    """A call's own arguments may speak of another one."""
    quoted = '<call> {"name": "write", "args": "<call> {"name": "bash"} </call> "} </call> <end>'
    assert read(TAGGED, quoted) == Ending(True, "write")
    both = '<call> {"name": "read"} </call> <call> {"name": "bash"} </call> <end>'
    assert read(TAGGED, both) == Ending(True, "read")


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ('[{"name": "bash", "parameters": {"a": "]x"}}] <end>', Ending(True, "bash")),
        ('[{"name":"bash", "parameters":{}}, {"name": "read", "parameters": {}}] <end>',
         Ending(True, "bash")),
        ('[{"name": "Bob", "age": 3}] <end>', UNKNOWN),
        ('{"city": "Paris"} <end>', UNKNOWN),
        ("yes <end>", UNKNOWN),
        ('<call> {"name": "bash"} </call> <end>', Ending(True, "bash")),
    ],
)  # fmt: skip
def test_in_an_answer_that_has_a_form_only_calls_are_understood(text: str, ending: Ending) -> None:
    assert AnswerReader(TAGGED, WORDS.decode).read_bound(WORDS.tokens(text)) == ending


def test_an_empty_answer_says_nothing() -> None:
    assert AnswerReader(TAGGED, WORDS.decode).read([]) == UNKNOWN


@pytest.mark.parametrize("marks", [TAGGED, BARE, LISTED, TEXTUAL])
@pytest.mark.parametrize(
    "end", [" prose <end>", " </call> <end>", " } <end>", " ] <end>", " <|call|>"]
)
def test_a_long_answer_is_decoded_in_small_part(marks: EndMarks, end: str) -> None:
    """However many openers an answer holds."""
    text = " ".join(["<call> [CALLS]", "word " * 20] * 2000) + f" {end}"
    answer = WORDS.tokens(text)
    before = WORDS.decoded
    AnswerReader(marks, WORDS.decode).read(answer)
    assert len(answer) > 40_000
    assert WORDS.decoded - before < 3000
