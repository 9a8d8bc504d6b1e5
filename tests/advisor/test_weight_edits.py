"""Weights edited over the page: seen before, written to the file, taken back."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from kvgraph.advisor.config.config import load
from kvgraph.advisor.config.edits import ConfigWatch
from kvgraph.advisor.page.page import QueryGate
from kvgraph.advisor.shadows.runner import ShadowRunner
from kvgraph.dashboards.access import edit_token, page_token
from kvgraph.graph.errors import ConfigError
from page_app import create_app
from small_world import World, page_over

SECRET = "a secret that nobody guesses"
FILE = """# ours
[sidecar]
interval_s = 0.5

[score]
age = 0.02  # by the second
protected_layers = ["rules"]

[prefetch]
enabled = true
"""


class Source:
    """A sidecar's page over a small world, with a configuration file."""

    def __init__(self, path: Path | None) -> None:
        self.world = World()
        self.now = 0.0
        self.watch = ConfigWatch(load(path, {}), path, {}, lambda: self.now)
        questions = QueryGate(self.world.graph.lock, lambda: 0.0)
        self.shadows = ShadowRunner(self.world.graph, lambda: self.now)
        self.page = page_over(
            self.world.graph, questions=questions, shadows=self.shadows, watch=self.watch
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kvgraph.toml"
    path.write_text(FILE)
    path.chmod(0o640)
    return path


@pytest.fixture
def source(path: Path) -> Source:
    return Source(path)


def client(source: Source, *, edits: bool = True) -> TestClient:
    headers = {"Authorization": f"Bearer {page_token(SECRET)}"}
    if edits:
        headers["X-Kvgraph-Edit"] = edit_token(SECRET)
    app = create_app(source, {"127.0.0.1"}, SECRET)  # type: ignore[arg-type]
    return TestClient(app, "http://127.0.0.1", headers=headers)


def test_a_change_is_written_to_the_file_and_all_else_stays(
    source: Source, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    change = {"score": {"age": 0.5, "degree": -7}, "edge_types": {"semantic": 2.0}}
    answer = client(source).put("/v1/weights", json=change)
    assert answer.status_code == 200
    assert (answer.json()["score"]["age"], answer.json()["undoable"]) == (0.5, 1)
    text = path.read_text()
    assert text.startswith("# ours\n[sidecar]\ninterval_s = 0.5\n")
    assert "[prefetch]\nenabled = true\n" in text
    assert path.stat().st_mode & 0o777 == 0o640
    source.now += 2.0
    fresh = source.watch.poll()
    assert (fresh.score.age, fresh.score.degree) == (0.5, -7)
    assert fresh.score.edge_types.semantic == 2.0
    assert fresh.score.protected_layers == {"rules"}
    assert "by the edit token: score.age = 0.5" in caplog.text


def test_a_layer_that_is_named_often_is_written_once(source: Source, path: Path) -> None:
    change = {"protected_layers": ["rules", "context", "rules"] * 1_000}
    assert client(source).put("/v1/weights", json=change).status_code == 200
    assert 'protected_layers = ["rules", "context"]\n' in path.read_text()


def test_another_policy_ranks_from_the_next_start_on(
    source: Source, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    page, runs = client(source), source.world.graph.policy.name
    answer = page.put("/v1/weights", json={"policy": "lru"}).json()
    assert (answer["policy"], answer["next_policy"]) == (runs, "lru")
    assert load(path, {}).policy.name == "lru"
    assert "by the edit token: policy.name = lru" in caplog.text
    source.now += 2.0
    assert source.watch.poll() is not None
    weights = page.get("/v1/weights").json()
    assert (weights["policy"], weights["next_policy"]) == (runs, "lru"), "it ranks on until then"
    assert page.post("/v1/weights/undo").status_code == 200
    assert path.read_text() == FILE


def test_another_policy_is_seen_before_it_ranks(source: Source, path: Path) -> None:
    for key in range(1, 4):
        source.world.serve(key, session=f"s{key}")
    before = source.world.graph.policy
    page = client(source, edits=False)
    for policy in ("lifecycle", "lru", "classic"):
        effect = page.post("/v1/weights/preview", json={"policy": policy}).json()
        assert effect["looked_at"] == 3
        said = f"under the policy {policy}" in effect["sentence"]
        assert said == (policy != before.name)
    assert source.world.graph.policy is before
    assert path.read_text() == FILE


def test_a_change_is_tried_in_a_shadow_and_nowhere_else(
    source: Source, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = source.world.graph.policy.weights
    answer = client(source).post("/v1/weights/trial", json={"score": {"age": 0.5}})
    assert answer.status_code == 200
    assert source.world.graph.policy.weights is before
    assert path.read_text() == FILE
    tried = source.shadows.otherwise
    assert (tried.weights.age, tried.said) == (0.5, "the weights that are tried: score.age = 0.5")
    assert "in a shadow: score.age = 0.5" in caplog.text
    refused = client(source).post("/v1/weights/trial", json={"score": {"aeg": 0.5}})
    assert (refused.status_code, source.shadows.otherwise) == (409, tried)


def test_changes_are_taken_back_one_by_one(source: Source, path: Path) -> None:
    page = client(source)
    for age in (1.0, 2.0):
        page.put("/v1/weights", json={"score": {"age": age}})
    assert page.post("/v1/weights/undo").json()["score"]["age"] == 1.0
    assert page.post("/v1/weights/undo").json()["score"]["age"] == 0.02
    assert path.read_text() == FILE
    answer = page.post("/v1/weights/undo")
    assert (answer.status_code, "no change" in answer.json()["detail"]) == (409, True)


def test_what_changes_something_needs_the_second_token(source: Source, path: Path) -> None:
    reader = client(source, edits=False)
    for answer in (
        reader.put("/v1/weights", json={"score": {"age": 1.0}}),
        reader.post("/v1/weights/undo"),
        reader.post("/v1/weights/trial", json={"score": {"age": 1.0}}),
        reader.put("/v1/weights", json={}, headers={"X-Kvgraph-Edit": page_token(SECRET)}),
    ):
        assert answer.status_code == 403
    assert path.read_text() == FILE
    foreign = client(source).put(
        "/v1/weights", json={"score": {"age": 1.0}}, headers={"Origin": "https://evil.example"}
    )
    assert foreign.status_code == 403


@pytest.mark.parametrize(
    "change",
    [
        {"score": {"ages": 1.0}},
        {"score": {"age = 1\n[http]\nhost": 1.0}},
        {"score": {"age": 1e30}},
        {"score": {"protected_share": 2.0}},
        {"edge_types": {"friendship": 1.0}},
        {"protected_layers": ["rules", 'x"]\n[http]\nallow_remote = ["']},
        {"policy": "best"},
        {"policy": 'lru"\n[http]\nhost = "0.0.0.0'},
    ],
)
def test_what_is_not_allowed_is_refused_and_nothing_is_written(
    source: Source, path: Path, change: dict[str, object]
) -> None:
    answer = client(source).put("/v1/weights", json=change)
    assert answer.status_code == 409
    assert answer.json()["detail"]
    assert path.read_text() == FILE


def test_what_the_environment_sets_cannot_be_changed_in_the_file(
    source: Source, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGRAPH_SCORE__AGE", "3")
    answer = client(source).put("/v1/weights", json={"score": {"age": 1.0}})
    assert answer.status_code == 409
    assert "which wins over the file" in answer.json()["detail"]
    assert path.read_text() == FILE


def test_without_a_file_nothing_can_be_changed() -> None:
    page = client(Source(None))
    weights = page.get("/v1/weights").json()
    assert not weights["is_editable"]
    answer = page.put("/v1/weights", json={"score": {"age": 1.0}})
    assert (answer.status_code, answer.json()["detail"]) == (409, weights["why_not"])


def test_without_a_file_a_change_can_be_looked_at_and_tried() -> None:
    source = Source(None)
    page = client(source)
    source.world.serve(1, 2)
    assert page.post("/v1/weights/preview", json={"score": {"age": 1.0}}).status_code == 200
    assert page.post("/v1/weights/trial", json={"score": {"age": 1.0}}).status_code == 200
    assert source.shadows.otherwise is not None
    refused = page.post("/v1/weights/trial", json={"score": {"age": "much"}})
    assert (refused.status_code, "score.age" in refused.json()["detail"]) == (422, True)


def test_a_section_that_is_not_there_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    source = Source(path)
    client(source).put("/v1/weights", json={"protected_layers": ["axioms", "rules"]})
    assert load(path, {}).score.protected_layers == {"axioms", "rules"}


def test_a_change_is_seen_before_it_is_made(source: Source, path: Path) -> None:
    world = source.world
    world.serve(1, 2, 3, session="old")
    for _ in range(4):
        world.serve(7, 8, session="much used", found=0)
    world.graph.policy.weights = source.watch.config.score.weights()  # type: ignore[attr-defined]
    before = world.graph.rank("a", 10).order.tolist()
    page = client(source, edits=False)
    quiet = page.post("/v1/weights/preview", json={}).json()
    assert (quiet["entering"], quiet["movers"], quiet["engine"]) == (0, [], "a")
    change = {"score": {"age": -100.0, "hit_count": 50.0, "session_credit": 0.0}}
    effect = page.post("/v1/weights/preview", json=change).json()
    assert effect["movers"]
    assert effect["looked_at"] == 5
    assert world.graph.rank("a", 10).order.tolist() == before
    assert path.read_text() == FILE


def test_a_file_that_became_wrong_is_not_made_worse(source: Source, path: Path) -> None:
    path.write_text("[score\n")
    with pytest.raises(ConfigError):
        source.watch.editor.apply({"score": {"age": 1.0}}, "edit")
    assert path.read_text() == "[score\n"


def edited(path: Path, text: str, change: dict[str, object]) -> str:
    """A file's text after one change over the page."""
    path.write_bytes(text.encode())
    Source(path).watch.editor.apply({"score": change}, "edit")
    return path.read_bytes().decode()


@pytest.mark.parametrize("text", ["score.age = 1.0\n", "score = {}\n", '["score"]\n'])
def test_any_form_of_a_section_can_be_changed(source: Source, path: Path, text: str) -> None:
    path.write_text(text)
    change = {"score": {"age": 0.5}, "edge_types": {"semantic": 2.0}}
    assert client(source).put("/v1/weights", json=change).status_code == 200
    found = load(path, {}).score
    assert (found.age, found.edge_types.semantic) == (0.5, 2.0)
    assert path.read_text().startswith(text[:7])


@pytest.mark.parametrize("text", ["score = 1\n", "[[score]]\n"])
def test_what_is_no_section_is_not_written(source: Source, path: Path, text: str) -> None:
    path.write_text(text)
    answer = client(source).put("/v1/weights", json={"score": {"age": 0.5}})
    assert answer.status_code == 409
    assert path.read_text() == text


def test_what_was_changed_by_hand_since_is_not_taken_back(source: Source, path: Path) -> None:
    page = client(source)
    page.put("/v1/weights", json={"score": {"age": 1.0}})
    by_hand = path.read_text() + "# tuned on a Sunday\n"
    path.write_text(by_hand)
    answer = page.post("/v1/weights/undo")
    assert (answer.status_code, "by hand" in answer.json()["detail"]) == (409, True)
    assert path.read_text() == by_hand
    page.put("/v1/weights", json={"score": {"age": 2.0}})
    assert page.post("/v1/weights/undo").json()["score"]["age"] == 1.0
    assert path.read_text() == by_hand


def test_a_link_stays_a_link_and_what_it_names_is_written(path: Path) -> None:
    link = path.with_name("link.toml")
    link.symlink_to(path.name)
    Source(link).watch.editor.apply({"score": {"age": 1.0}}, "edit")
    assert link.is_symlink()
    assert load(path, {}).score.age == 1.0


def test_a_planted_link_is_not_written_through(source: Source, path: Path) -> None:
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.with_name(f".{path.name}.new").symlink_to(victim)
    source.watch.editor.apply({"score": {"age": 1.0}}, "edit")
    assert victim.read_text() == "precious"
    assert not path.is_symlink()


def test_a_private_file_is_never_open_to_others(
    source: Source, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.chmod(0o600)
    real, opened = os.open, []

    def opening(name: str, flags: int, mode: int = 0o777, **more: int | None) -> int:
        if Path(name).parent == path.parent:
            opened.append(mode)
        return real(name, flags, mode, **more)

    monkeypatch.setattr(os, "open", opening)
    source.watch.editor.apply({"score": {"age": 1.0}}, "edit")
    assert opened == [0o600]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_nothing_behind(
    source: Source, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        source.watch.editor.apply({"score": {"age": 1.0}}, "edit")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_text() == FILE
    assert source.watch.editor.undoable == 0


def test_an_array_of_many_lines_is_replaced_whole(path: Path) -> None:
    text = '[score]\nprotected_layers = [\n  "rules", # ours\n  "axioms",\n]  # both\nage = 1\n'
    assert edited(path, text, {"protected_layers": ["context"]}) == (
        '[score]\nprotected_layers = ["context"]  # both\nage = 1\n'
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("age = 0.5  # tuned # twice", "age = 2.0  # tuned # twice"),
        ("  age=0.5", "  age=2.0"),
        ('"age" = 0.5', '"age" = 2.0'),
        ("# a\u2028b\nage = 0.5", "# a\u2028b\nage = 2.0"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_comments_and_line_ends_stay(path: Path, line: str, expected: str, end: str) -> None:
    text = f"[score]\n{line}\n\n[prefetch]\nenabled = true\n"
    expected = f"[score]\n{expected}\ndegree = 3.0\n\n[prefetch]\nenabled = true\n"
    found = edited(path, text.replace("\n", end), {"age": 2, "degree": 3})
    assert found == expected.replace("\n", end)


@pytest.mark.parametrize("text", [b"# caf\xe9\n[score]\n", None])
def test_a_file_that_cannot_be_read_is_refused(
    source: Source, path: Path, text: bytes | None
) -> None:
    path.unlink()
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text)
    page = client(source)
    change = {"score": {"age": 1.0}}
    for ask, address in ((page.put, "/v1/weights"), (page.post, "/v1/weights/preview")):
        answer = ask(address, json=change)
        assert (answer.status_code, str(path) in answer.json()["detail"]) == (409, True)


@pytest.mark.parametrize("name", ["protected_layers", "edge_types"])
def test_what_is_no_number_of_the_score_is_refused(source: Source, path: Path, name: str) -> None:
    page, change = client(source), {"score": {name: 1.0}}
    for ask, address in ((page.post, "/trial"), (page.put, ""), (page.post, "/preview")):
        answer = ask(f"/v1/weights{address}", json=change)
        assert answer.status_code == 409
        assert "name it beside score" in answer.json()["detail"]
    assert path.read_text() == FILE


def test_what_is_tried_in_a_shadow_can_be_ended(source: Source) -> None:
    page = client(source)
    source.shadows.tick()
    names = [
        {
            each["name"]
            for each in page.post("/v1/weights/trial", json={"score": {"age": 1.0}}).json()[
                "shadows"
            ]
        }
    ]
    names.append({each["name"] for each in page.delete("/v1/weights/trial").json()["shadows"]})
    assert names[0] - names[1] == {"other weights"}
    assert source.shadows.otherwise is None
    source.shadows.tick()
    assert client(source, edits=False).delete("/v1/weights/trial").status_code == 403
