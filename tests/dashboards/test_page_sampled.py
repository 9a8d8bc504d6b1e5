"""What sampled steps told, as the page answers it."""

from __future__ import annotations

import numpy as np
import pytest
from kvgraph.advisor.page.page import Page
from kvgraph.advisor.page.sampled import sampled_of
from kvgraph.graph.errors import GraphError
from kvgraph.graph.types import SourceLayer
from kvgraph.graph.wire.events import BlocksAttended, ConfidenceSampled, Segment
from small_world import SIZE, World, pack, page_of

RULES = Segment(int(SourceLayer.RULES), 0, 2 * SIZE, name="house rules")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def page(world: World) -> Page:
    return page_of(world)


def look(world: World, keys: tuple[int, ...], mass: tuple[float, ...]) -> None:
    world.tell(BlocksAttended(pack(*keys), np.array(mass, dtype="<f4").tobytes()))


def test_where_nobody_samples_there_is_nothing(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    view = sampled_of(page, 10)
    assert (view.layers, view.blocks, view.sessions, view.confidence) == ([], [], [], None)


def test_layers_and_blocks_are_told_by_how_much_they_are_looked_at(
    world: World, page: Page
) -> None:
    world.serve(1, 2, 3, 4, segments=(RULES,))
    for _ in range(5):
        look(world, (1, 2, 3, 4), (0.5, 0.25, 0.15, 0.1))
    world.evict(4)
    view = sampled_of(page, 3)
    assert [(each.layer, each.blocks) for each in view.layers] == [("rules", 2), ("user_turn", 2)]
    assert [each.attention for each in view.layers] == pytest.approx([0.75, 0.25], abs=0.001)
    assert [int(each.key, 16) for each in view.blocks] == [1, 2, 3]
    assert (view.blocks[0].identity, view.blocks[0].session) == ("house rules", "s")
    assert [each.in_pool for each in sampled_of(page, 4).blocks] == [True, True, True, False]
    assert view.edges["co_attend"] > 0


def test_the_least_sure_session_is_first(world: World, page: Page) -> None:
    for session, sure in (("calm", 0.9), ("lost", 0.3), ("unsampled", None)):
        world.serve(1, 2, session=session)
        if sure is not None:
            world.tell(ConfidenceSampled(b"", sure, session=session))
    view = sampled_of(page, 10)
    assert [(each.session, each.confidence) for each in view.sessions] == [
        ("lost", 0.3),
        ("calm", 0.9),
    ]
    assert view.confidence == pytest.approx(0.6)


def test_of_one_session_only_what_it_holds_is_told(world: World, page: Page) -> None:
    for session, keys in (("one", (1, 2)), ("other", (3, 4))):
        world.serve(*keys, session=session)
        look(world, keys, (0.6, 0.4))
        world.tell(ConfidenceSampled(b"", 0.5, session=session))
    view = sampled_of(page, 10, "other")
    assert [int(each.key, 16) for each in view.blocks] == [3, 4]
    assert [each.session for each in view.sessions] == ["other"]
    with pytest.raises(GraphError, match="no session of that name"):
        sampled_of(page, 10, "nobody")
