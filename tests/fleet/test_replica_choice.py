"""The router before replicas that come and go, as Ray Serve asks it."""

from __future__ import annotations

import itertools
from typing import Any

from kvgraph.advisor.fleet.board import Speed
from kvgraph.advisor.fleet.replica_choice import ReplicaChoice

REPLICAS = ["a", "b", "c"]


class Deployment:
    """Replicas, and requests that end when they are told to."""

    def __init__(self, pool_tokens: int = 0) -> None:
        self.choice = ReplicaChoice(speed=Speed(pool_tokens=pool_tokens))
        self.replicas = list(REPLICAS)
        self._numbers = itertools.count()

    def send(self, session: str, prompt: str = "hello", **body: Any) -> tuple[str, str]:
        """The request's name, and where it went."""
        request = f"r{next(self._numbers)}"
        self.choice.present(self.replicas)
        found = self.choice.choose(request, {"prompt": prompt, **body}, self.replicas, session)
        assert sorted(found) == sorted(self.replicas)
        self.choice.routed(request, found[0], 1.0)
        return request, found[0]

    def serve(self, session: str, prompt: str = "hello", **body: Any) -> str:
        request, replica = self.send(session, prompt, **body)
        self.choice.completed(request)
        return replica


def test_sessions_stay_at_home_and_new_ones_spread() -> None:
    deployment = Deployment()
    homes = [deployment.serve(f"s{number}") for number in range(6)]
    assert [homes.count(replica) for replica in REPLICAS] == [2, 2, 2]
    assert [deployment.serve(f"s{number}") for number in range(6)] == homes
    assert deployment.choice.router.counts == {"new": 6, "home": 6}


def test_a_replica_that_is_gone_loses_its_sessions_and_a_new_one_gets_some() -> None:
    deployment = Deployment()
    homes = {f"s{number}": deployment.serve(f"s{number}") for number in range(6)}
    deployment.replicas = ["b", "c", "d"]
    moved = {session: deployment.serve(session) for session in homes}
    assert "a" not in moved.values()
    assert deployment.choice.router.counts["home_down"] == 2
    assert {s for s in homes if moved[s] == homes[s]} == {s for s in homes if homes[s] != "a"}


def crowded(deployment: Deployment, home: str) -> None:
    """Other sessions' prompts go to a session's home until its pool has let go of what it had."""
    deployment.replicas = [home]
    for number in range(4):
        deployment.serve(f"other {number}", f"{number}" * 8000)
    deployment.replicas = list(REPLICAS)


def test_a_home_that_lost_the_context_is_left_where_its_pool_is_stated() -> None:
    stated, unknown = Deployment(pool_tokens=5_000), Deployment()
    for deployment in (stated, unknown):
        crowded(deployment, deployment.serve("s", "x" * 8000))
        deployment.serve("s", "x" * 9000)
    assert stated.choice.router.counts["home_forgot"] == 1
    assert unknown.choice.router.counts["home_forgot"] == 0


def test_short_prompts_and_replicas_that_were_away_lost_nothing() -> None:
    deployment = Deployment(pool_tokens=5_000)
    crowded(deployment, deployment.serve("short"))
    assert deployment.serve("short") in REPLICAS
    home = deployment.serve("s", "y" * 8000)
    crowded(deployment, home)
    deployment.replicas = [each for each in REPLICAS if each != home]
    deployment.choice.present(deployment.replicas)
    deployment.replicas = list(REPLICAS)
    assert deployment.serve("s", "y" * 9000) == home
    assert deployment.choice.router.counts["home_forgot"] == 0


def test_what_waits_is_forgotten_when_a_request_ends() -> None:
    deployment = Deployment()
    requests = [deployment.send(f"s{n}", str(n) * 4000)[0] for n in range(5)]
    waiting = deployment.choice.router.board.waiting
    assert waiting.sum() == 5000
    for request in requests:
        deployment.choice.completed(request)
        deployment.choice.completed(request)
    assert waiting.tolist() == [0, 0, 0]


def test_a_request_that_went_elsewhere_has_its_home_there() -> None:
    deployment = Deployment()
    deployment.choice.present(deployment.replicas)
    first, *others = deployment.choice.choose("r", {"prompt": "x"}, deployment.replicas, "s")
    deployment.choice.routed("r", others[0], 1.0)
    deployment.choice.completed("r")
    assert deployment.serve("s") == others[0] != first


def test_a_home_that_had_no_room_is_counted_as_overloaded() -> None:
    deployment = Deployment()
    home = deployment.serve("s")
    found = deployment.choice.choose("r", {"prompt": "x"}, deployment.replicas, "s")
    assert found[0] == home
    deployment.choice.routed("r", found[1], 1.0)
    assert deployment.choice.router.counts == {"new": 1, "home_overloaded": 1}


def test_a_name_that_is_none_is_the_engines_to_refuse() -> None:
    deployment = Deployment()
    assert deployment.serve("", session_id="x" * 1000) in REPLICAS
    hints = {"kvgraph": {"session": 5}}
    assert deployment.serve("", kv_transfer_params=hints) in REPLICAS


def test_a_session_that_ended_has_no_home() -> None:
    deployment = Deployment()
    ended = {"kvgraph": {"session_ended": True}}
    deployment.serve("s", kv_transfer_params=ended)
    assert deployment.choice.router.board.live.sum() == 0
