"""Beside any connector of vLLM's or the user's: it stays what it is, and we look on."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.graph.wire.events import RequestStarted
from kvgraph.hooks.vllm import patches
from kvgraph.hooks.vllm.patches import FOLLOWED, WATCH, follow_connectors, observed_class
from kvgraph_bench.paper.paper_engine import NOBODY, PaperEngine, Shape
from paper import changed, fail, text
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

pytestmark = pytest.mark.usefixtures("vllm_loaded")
SHIPPED = (
    "ExampleConnector", "ExampleHiddenStatesConnector", "LMCacheConnectorV1", "LMCacheMPConnector",
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MultiConnector",
    "HiSparseConnector", "MoRIIOConnector", "OffloadingConnector", "DecodeBenchConnector",
    "MooncakeConnector", "MooncakeStoreConnector", "FlexKVConnectorV1",
    "SimpleCPUOffloadConnector", "HF3FSKVConnector",
)  # fmt: skip
NEED_MORE = {"LMCacheMPConnector", "MoRIIOConnector"}  # lmcache, and msgpack, which vLLM leaves out


def registry() -> Any:
    return KVConnectorFactory._registry


def base() -> Any:
    return KVConnectorBase_V1


def test_every_connector_that_vllm_ships_is_known_here() -> None:
    assert set(registry()) == set(SHIPPED)


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - NEED_MORE))
def test_a_connector_keeps_its_name_its_kind_and_all_else_that_it_does(name: str) -> None:
    theirs = registry()[name]()
    ours = observed_class(theirs)
    assert issubclass(ours, theirs)
    assert (ours.__name__, ours.__module__) == (theirs.__name__, theirs.__module__)
    assert supports_hma(ours) == supports_hma(theirs)
    own = {*FOLLOWED, "_abc_impl"}  # each abstract class has one
    kept = [at for at in dir(theirs) if at not in own and not at.startswith("__")]
    assert [at for at in kept if plain(ours, at) is not plain(theirs, at)] == []
    for at in FOLLOWED:
        if hasattr(theirs, at):
            assert inspect.signature(getattr(ours, at)) == inspect.signature(getattr(theirs, at))


def plain(cls: type, name: str) -> Any:
    return inspect.getattr_static(cls, name)


@pytest.mark.parametrize("name", sorted(NEED_MORE))
def test_one_that_does_not_import_here_is_judged_by_what_it_overrides(name: str) -> None:
    loader = registry()[name]
    cells = dict(zip(loader.__code__.co_freevars, loader.__closure__, strict=True))
    spec = importlib.util.find_spec(cells["module_path"].cell_contents)
    tree = ast.parse(Path(str(spec.origin)).read_text())
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    ours = [each for each in classes if "Connector" in each.name and each.bases]
    defined = {d.name: d for each in ours for d in each.body if isinstance(d, ast.FunctionDef)}
    assert {"get_num_new_matched_tokens", "build_connector_meta"} <= defined.keys()
    assert not {"__slots__", "__init_subclass__", "__setattr__"} & defined.keys()
    for at in FOLLOWED:
        if at in defined:
            assert not defined[at].decorator_list, "called on an instance, as we call it"


# A real scheduler with the user's connector -----------------------------------------------------


USER = {
    "kv_connector": "UserConnector", "kv_connector_module_path": "engine_user_connector",
    "kv_role": "kv_both",
}  # fmt: skip


@pytest.fixture
def user_config(paper_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's configuration with a user's connector of the older kind, without hybrid support."""
    # Put back afterwards, whatever is wrapped.
    monkeypatch.setattr(KVConnectorFactory, "create_connector", KVConnectorFactory.create_connector)
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", NOBODY)

    def make(**fields: Any) -> Any:
        config = changed(paper_config, "scheduler_config", disable_hybrid_kv_cache_manager=True)
        config.kv_transfer_config = KVTransferConfig(**{**USER, **fields})
        return config

    return make


def test_the_users_connector_is_called_as_in_stock_and_we_see_the_requests(
    user_config: Any,
) -> None:
    follow_connectors()
    follow_connectors()
    config = user_config()
    engine = PaperEngine(config, Shape(stock=True))
    assert engine.config.kv_transfer_config is config.kv_transfer_config
    connector = engine.connector
    assert type(connector).__name__ == "UserConnector"
    before = type(connector).steps
    answer = engine.serve(text(3, 1), output=5)
    engine.serve(text(3, 1), output=5)
    assert type(connector).steps - before >= 10
    started = told(connector)
    assert [event.cached_tokens for event in started] == [0, 48]
    engine.close()
    stock_config = copy(config)
    stock_config.kv_transfer_config = None
    stock = PaperEngine(stock_config, Shape(stock=True))
    assert stock.serve(text(3, 1), output=5) == answer


def test_all_parts_of_a_multi_connector_are_left_alone(user_config: Any) -> None:
    follow_connectors()
    fields = {"kv_connector_module_path": None, "kv_connector_extra_config": {"connectors": [USER]}}
    engine = PaperEngine(user_config(kv_connector="MultiConnector", **fields), Shape(stock=True))
    assert type(engine.connector).__name__ == "MultiConnector"
    (child,) = engine.connector.sub_connectors
    assert type(child).__qualname__ == "UserConnector"
    assert not hasattr(child, WATCH)
    engine.serve(text(3, 1), output=2)
    assert len(told(engine.connector)) == 1
    engine.close()


def test_an_error_of_ours_leaves_the_users_connector_working(
    user_config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    follow_connectors()
    engine = PaperEngine(user_config(), Shape(stock=True))
    watch = getattr(engine.connector, WATCH)
    monkeypatch.setattr(watch.side.observer, "request_scheduled", fail)
    assert len(engine.serve(text(3, 1), output=5)) == 5
    assert watch.side is None
    assert "disabled after RuntimeError" in caplog.text
    assert "cache_full_blocks" not in vars(engine.pool)
    engine.close()


def test_one_that_cannot_be_observed_runs_as_in_stock(
    user_config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patches, "observed_class", fail)
    follow_connectors()
    engine = PaperEngine(user_config(), Shape(stock=True))
    assert "connector runs as in stock vLLM, and is not observed (RuntimeError" in caplog.text
    assert len(engine.serve(text(3, 1), output=5)) == 5
    engine.close()


def told(connector: Any) -> list[RequestStarted]:
    queue = getattr(connector, WATCH).side.client.outbox
    return [event for event in queue if isinstance(event, RequestStarted)]


# What a MultiConnector with a part of ours used to change -----------------------------------------


def test_a_handshake_of_pipeline_stages_reaches_the_users_connector_alone() -> None:
    class Connector(base()):  # type: ignore[misc]
        met: Any = None

        def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
            self.met = metadata

        get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = None
        start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None

    connector = observed_class(Connector).__new__(observed_class(Connector))
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): "stage"})
    assert connector.met == {(1, 0): "stage"}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_connector_that_counts_its_own_answers_is_counted_by_them(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of tensor parallel ranks answers: waiting for all, requests would never be over."""
    executor = new_executor(workers, monkeypatch)
    theirs = observed_class(registry()["ExampleHiddenStatesConnector"]())
    executor.init_kv_output_aggregator(theirs.__new__(theirs))
    assert executor.kv_output_aggregator._expected_finished_count == 1


def test_hits_of_hybrid_models_are_as_deep_as_the_users_connector_allows() -> None:
    theirs = observed_class(registry()["NixlConnector"]())
    assert theirs.__new__(theirs).supports_divergent_local_hybrid_hits


# Workers ----------------------------------------------------------------------------------------


def new_executor(workers: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    original = Executor.init_kv_output_aggregator
    monkeypatch.setattr(Executor, "init_kv_output_aggregator", original)
    patches.spare_aggregation()
    patches.spare_aggregation()
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.parallel_config = SimpleNamespace(world_size=workers)
    executor.kv_output_aggregator = executor.ec_output_aggregator = None
    return executor


@pytest.mark.parametrize(("warm", "aggregated"), [(None, False), (64, True)])
def test_only_where_we_move_blocks_do_all_workers_answer(
    paper: Any, warm: int | None, aggregated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = new_executor(8, monkeypatch)
    executor.init_kv_output_aggregator(paper(Shape(warm=warm)).connector)
    assert (executor.kv_output_aggregator is not None) is aggregated


def test_rays_executor_gets_what_it_insists_on(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = new_executor(8, monkeypatch)
    executor.has_connector = True
    executor.init_kv_output_aggregator(paper(Shape(warm=None)).connector)
    assert executor.kv_output_aggregator is not None
