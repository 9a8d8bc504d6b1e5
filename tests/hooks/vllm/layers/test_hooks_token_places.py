"""Characters are found in their tokens, whatever the tokenizer, and however long the text is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from kvgraph.hooks.requests.borders import TokenPlaces


def test_a_character_is_found_in_its_token() -> None:
    words = ["ab", "cd", "", "ef"]
    places = TokenPlaces(lambda tokens: "".join(words[i] for i in tokens), range(4))
    assert [places.of(character) for character in range(6)] == [0, 0, 1, 1, 3, 3]
    assert places.length == 6


def in_bytes(tokens: Sequence[int]) -> str:
    """Each token is a byte: a character may have several."""
    return bytes(tokens).decode("utf-8", "replace")


def without_first_space(tokens: Sequence[int]) -> str:
    """As SentencePiece decodes: a word begins with a space, but for the first one."""
    return "".join(f" w{token}" for token in tokens)[1:]


@pytest.mark.parametrize("decode", [in_bytes, without_first_space])
def test_places_are_those_that_decoding_every_prefix_gives(decode: object) -> None:
    rng = random.Random(7)
    if decode is in_bytes:
        text = "".join(rng.choice("aé€🙂 \n") for _ in range(300))
        tokens: list[int] = [*text.encode()]
    else:
        tokens = [rng.randrange(300) for _ in range(400)]
        text = without_first_space(tokens)
    assert callable(decode)
    places = TokenPlaces(decode, tokens)
    assert places.length == len(text)
    for place in rng.sample(range(len(text)), 60):
        whole = next(n for n in range(len(tokens)) if len(decode(tokens[: n + 1])) > place)
        assert places.of(place) == whole


def test_a_tokenizer_whose_parts_do_not_add_up_is_noticed() -> None:
    places = TokenPlaces(lambda tokens: "x" * (len(tokens) ** 2), range(200))
    assert places.length != 200**2
