"""What we rely on in vLLM is there: in the one that is installed, and in the releases beside it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_sources
from kvgraph.hooks.doctor import command as doctor
from kvgraph.hooks.vllm import plugin, shapes, versions
from kvgraph.hooks.vllm.patches import bind_scheduler
from kvgraph.hooks.vllm.patching import after, patch
from kvgraph.hooks.vllm.relied_on import RELIED_ON, VALUE, Need, Part, Use, misfit, misfits
from kvgraph.hooks.vllm.tiers.idle import follow_loops
from kvgraph.hooks.vllm.versions import live_misfits, live_shape

pytestmark = pytest.mark.usefixtures("vllm_loaded")
HOOKS = Path(__file__).parents[2] / "hooks"
KEPT = vllm_sources.kept_releases()


# The table --------------------------------------------------------------------------------------


def imported_by_hooks() -> Iterator[str]:
    """``module.name`` of all that our hooks import from vLLM when they run."""
    for path in (HOOKS / "vllm").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in [each for each in ast.walk(tree) if isinstance(each, ast.If)]:
            if ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_all_that_is_imported_is_in_the_table() -> None:
    stated = {need.name for need in RELIED_ON}
    known = stated | {name.rpartition(".")[0] for name in stated}
    assert {name for name in imported_by_hooks() if name not in known} == set()


def test_a_name_stands_once_in_the_table() -> None:
    assert len({need.name for need in RELIED_ON}) == len(RELIED_ON)


# Patches ----------------------------------------------------------------------------------------


def test_nothing_is_patched_that_is_not_in_the_list() -> None:
    with pytest.raises(KeyError, match=r"Scheduler\.shutdown is not in the list"):
        patch(type("Scheduler", (), {"shutdown": lambda self: None}), "shutdown", lambda own: own)


@pytest.mark.parametrize("kind", [classmethod, staticmethod, lambda plain: plain])
def test_a_patch_calls_vllms_own_first_once_and_swallows_what_ours_raises(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def own(*args: Any, **named: Any) -> str:
        """vLLM's own."""
        calls.append("own")
        return "its result"

    def ours(result: str, *args: Any, **named: Any) -> None:
        calls.append((result, args[-1], named))
        raise RuntimeError("ours")

    executor = type("Executor", (), {"init_kv_output_aggregator": kind(own)})
    for _ in range(2):
        after(executor, "init_kv_output_aggregator", ours, "nothing is spared")
    assert executor().init_kv_output_aggregator(7, at=8) == "its result"
    assert calls == ["own", ("its result", 7, {"at": 8})]
    assert executor.init_kv_output_aggregator.__doc__ == "vLLM's own."
    assert caplog.messages == ["kvgraph: nothing is spared (RuntimeError: ours)"]


# Releases ---------------------------------------------------------------------------------------


def test_the_installed_vllm_has_it_all() -> None:
    assert [problem for part in Part for problem in live_misfits(part)] == []


def test_the_sources_of_the_installed_vllm_say_what_it_has() -> None:
    """What reads releases that are not installed is held against one that is."""
    import vllm

    sources = vllm_sources.Sources(Path(vllm.__file__).parents[1])
    assert {n.name: sources.shape_of(n) for n in RELIED_ON} == {
        n.name: live_shape(n) for n in RELIED_ON
    }


@pytest.mark.parametrize("release", KEPT)
def test_a_release_beside_it_has_it_all(release: str) -> None:
    shapes_of = KEPT[release]
    assert set(shapes_of) == {need.name for need in RELIED_ON}, vllm_sources.__doc__
    assert misfits(RELIED_ON, lambda need: shapes_of[need.name]) == []


def test_no_release_is_said_to_fit_that_was_not_read() -> None:
    assert {".".join(each.split(".")[:2]) for each in KEPT} == set(versions.COMPARED)
    assert all(versions.is_known(each) and not versions.is_tested(each) for each in KEPT)
    assert not versions.is_known("0.3.0")
    assert not versions.is_known("0.34.0rc1")


# Judgement --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "known", "shape", "words"),
    [
        (Use.READ, "", None, "m.C.f is missing"),
        (Use.READ, "", VALUE, None),
        (Use.READ, "", (), "m.C.f is a method"),
        (Use.CALLED, "a", VALUE, "m.C.f is no method"),
        (Use.NAMED, "", ("a",), None),
        (Use.CALLED, "a b", ("a", "b"), None),
        (Use.CALLED, "a b", ("a", "b", "c=", "*args", "**more"), None),
        (Use.CALLED, "a b", ("a",), "m.C.f takes no b"),
        (Use.CALLED, "a b", ("b", "a"), "m.C.f takes a, b in another order"),
        (Use.CALLED, "a", ("a", "tier"), "m.C.f wants tier"),
        (Use.OVERRIDDEN, "a", ("a", "**more"), None),
        (Use.OVERRIDDEN, "a", ("a", "tier="), "m.C.f wants tier"),
    ],
)
def test_what_fits(use: Use, known: str, shape: Any, words: str | None) -> None:
    assert misfit(Need("m", "C.f", use, tuple(known.split())), shape) == words


def test_sources_are_read_as_they_would_be_imported(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("from .below import Named as Other\n")
    (tmp_path / "vllm" / "below.py").write_text(
        "class Base:\n"
        "    def __init__(self): self.x = 1\n"
        "    @property\n"
        "    def y(self): ...\n"
        "class Named(Base):\n"
        "    z: int\n"
        "    @classmethod\n"
        "    def call(cls, a, b=1, *more, c, d=2, **rest): ...\n"
    )
    sources = vllm_sources.Sources(tmp_path)

    def shape(path: str) -> Any:
        return sources.shape_of(Need("vllm", path, Use.NAMED))

    assert [shape(f"Other.{name}") for name in "xyz"] == [VALUE] * 3
    assert shape("Other.call") == ("a", "b=", "*more", "c", "d=", "**rest")
    assert shape("Other.gone") is None
    assert shape("Gone.x") is None


# Standing aside ---------------------------------------------------------------------------------

Spoil = Callable[[type, str], None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Makes a method want a parameter that nobody knows."""

    def other(owner: type, name: str) -> None:
        def method(self: Any, surprise: Any) -> None: ...

        monkeypatch.setattr(owner, name, method)

    return other


def test_a_vllm_that_does_not_fit_runs_as_stock_after_one_line(
    paper_config: Any, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.core.block_pool import BlockPool

    spoil(BlockPool, "touch")
    plugin.attach(paper_config)
    assert paper_config.kv_transfer_config is None
    (line,) = caplog.messages
    assert "not attached: this vLLM is not one that we know: " in line
    assert "BlockPool.touch takes no blocks" in line
    assert "vLLM 0.31, 0.32, 0.33 fit; tests run with 0.32.x" in line
    assert doctor.check_hooks().ok is False


def test_what_tiers_alone_need_costs_tiers_alone(paper_config: Any, spoil: Spoil) -> None:
    from vllm.v1.core.block_pool import BlockPool

    spoil(BlockPool, "get_new_blocks")
    assert shapes.reason_to_decline(paper_config) is None
    reason = str(shapes.reason_for_no_tiers(paper_config))
    assert "vllm.v1.core.block_pool.BlockPool.get_new_blocks takes no num_blocks" in reason
    check = doctor.check_hooks()
    assert check.ok
    assert check.detail.startswith("no tiers with this vLLM: ")
    assert check.remedy


def test_what_admission_alone_needs_costs_admission_alone(paper_config: Any, spoil: Spoil) -> None:
    from vllm.v1.core.sched.request_queue import RequestQueue

    spoil(RequestQueue, "pop_request")
    assert shapes.reason_to_decline(paper_config) is None
    assert shapes.reason_for_no_tiers(paper_config) is None
    with pytest.raises(TypeError, match=r"RequestQueue\.pop_request wants surprise"):
        bind_scheduler(SimpleNamespace(connector=None))


def test_what_waking_alone_needs_costs_waking_alone(
    paper_config: Any, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    spoil(EngineCore, "is_scheduler_paused")
    stock = EngineCoreProc.run_busy_loop
    follow_loops()
    assert EngineCoreProc.run_busy_loop is stock
    (line,) = caplog.messages
    assert "not woken for prefetches" in line
    assert "EngineCoreProc.is_scheduler_paused wants surprise" in line
    assert shapes.reason_for_no_tiers(paper_config) is None


@pytest.mark.parametrize(
    ("version", "words", "warns"),
    [
        ("0.32.0", "version 0.32.0; vLLM 0.31, 0.32, 0.33 fit", False),
        ("0.33.0", "version 0.33.0, of which names and parameters were compared", False),
        ("0.34.1", "version 0.34.1 was not looked through; vLLM 0.31, 0.32, 0.33 fit", True),
    ],
)
def test_doctor_says_which_versions_fit(
    version: str, words: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    check = doctor.check_vllm()
    assert check.ok
    assert check.detail.startswith(words)
    assert bool(check.remedy) is warns


ASKING = {
    "v1/core/new.py": "class Pool:\n  def size(self, c):\n    return not c.kv_transfer_config\n",
    "v1/alias.py": "def f(c):\n  kv = c.kv_transfer_config\n  if kv:\n    return kv\n",
    "v1/named.py": "async def g(c):\n  return getattr(c, 'kv_transfer_config', None)\n",
    "v1/bare.py": "def h(kv_transfer_config):\n  return kv_transfer_config\n",
    "v1/worker/worker_base.py": "class WorkerBase:\n  def __init__(self, c):\n"
    "    self.kv = c.kv_transfer_config\n  def more(self, c):\n    return c.kv_transfer_config\n",
    "v1/broken.py": "kv_transfer_config = (\n",
    "v1/silent.py": "# kv_transfer_config\ndef none():\n  return 'kv_transfer_config of it'\n",
    "distributed/kv_transfer/own.py": "def x(c):\n  return c.kv_transfer_config\n",
}


def test_where_a_vllm_asks_for_what_we_set_is_named(tmp_path: Path) -> None:
    from kvgraph.hooks.vllm.relied_on import unknown_places

    for name, source in ASKING.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert unknown_places(tmp_path) == [
        "v1/alias.py:f",
        "v1/bare.py:h",
        "v1/broken.py:?",
        "v1/core/new.py:Pool.size",
        "v1/named.py:g",
        "v1/worker/worker_base.py:WorkerBase.more",
    ]


def test_all_places_of_the_installed_vllm_are_known() -> None:
    import vllm
    from kvgraph.hooks.vllm.versions import live_unknown_places

    assert live_unknown_places() == []
    assert vllm.__version__.partition("+")[0] in versions.READ
    assert {each.rpartition(".")[0] for each in versions.READ} == {
        versions.TESTED, *versions.COMPARED
    }  # fmt: skip


def test_unknown_places_are_told_once_and_by_doctor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvgraph.hooks.vllm import plugin

    for module in (plugin, doctor):
        monkeypatch.setattr(module, "live_unknown_places", lambda: ["v1/core/new.py:Pool.size"])
    plugin._check_version()
    assert "new.py" not in caplog.text, "of a release that was read, nobody asks at each start"
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    plugin._check_version()
    assert caplog.text.count("v1/core/new.py:Pool.size") == 1
    check = doctor.check_conditions()
    assert check.ok
    assert check.remedy
    assert "v1/core/new.py:Pool.size" in check.detail
