"""The plugin: silent when off, idempotent, leaving the user's connector alone, never raising."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kvgraph.graph.errors import ConfigError
from kvgraph.hooks.settings import switched_on
from kvgraph.hooks.vllm import plugin

pytestmark = pytest.mark.usefixtures("vllm_loaded")
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
ENDPOINT = "ipc:///tmp/somewhere"


@pytest.fixture
def engine_args(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's ``EngineArgs`` whose ``create_engine_config`` is put back afterwards."""
    from vllm.engine.arg_utils import EngineArgs

    def create_engine_config(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        return config()

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_engine_config)
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", ENDPOINT)
    monkeypatch.setenv(RESERVED, "unset")  # so that it is put back, whatever the plugin does
    monkeypatch.delenv(RESERVED)
    return EngineArgs


def config(user: Any = None, prefix_caching: bool = True, encoder_decoder: bool = False) -> Any:
    return SimpleNamespace(
        kv_transfer_config=user, additional_config={},
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        model_config=SimpleNamespace(
            is_encoder_decoder=encoder_decoder, is_hybrid=False, enable_sleep_mode=False,
            is_attention_free=False,
        ),
        parallel_config=SimpleNamespace(
            local_world_size=2, data_parallel_size_local=1, distributed_executor_backend="mp",
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("user", "kept"), [(None, "2"), ("5", "5")])
def test_a_cpu_engine_keeps_the_threads_that_it_has_without_us(
    user: str | None, kept: str, engine_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if user is not None:
        monkeypatch.setenv(RESERVED, user)
    plugin.attach(config())
    assert os.environ[RESERVED] == kept


def test_a_rival_that_answers_to_our_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = SimpleNamespace(name="aither_kvcache", value="aither_kvcache.vllm.plugin:register")
    monkeypatch.setattr(plugin.importlib.metadata, "entry_points", lambda group: [rival])
    assert plugin.rival_plugins() == []  # the tests leave it out
    monkeypatch.delenv("VLLM_PLUGINS")
    assert plugin.rival_plugins() == ["aither_kvcache"]


def transfer(**fields: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**fields)


@pytest.mark.parametrize("value", [None, "", "0", "false", "off", " No "])
def test_off_wraps_nothing(
    value: str | None, engine_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AITHER_KVCACHE_GRAPH", raising=False)
    if value is not None:
        monkeypatch.setenv("AITHER_KVCACHE_GRAPH", value)
    before = engine_args.create_engine_config
    plugin.register()
    assert engine_args.create_engine_config is before
    assert not switched_on()


def test_on_wraps_once_and_attaches(
    engine_args: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_GRAPH", "1")
    monkeypatch.setenv("AITHER_KVCACHE_HINT", "all")
    plugin.register()
    wrapped = engine_args.create_engine_config
    plugin.register()
    assert engine_args.create_engine_config is wrapped
    told = "variables: AITHER_KVCACHE_HINT (did you mean AITHER_KVCACHE_HINTS?)"
    assert caplog.text.count(told) == 1
    made = wrapped(SimpleNamespace(), headless=True)
    assert made.kv_transfer_config.kv_connector == "KvGraphConnector"


def test_a_failure_leaves_one_warning_and_a_stock_engine(
    engine_args: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setenv("AITHER_KVCACHE_GRAPH", "1")
    monkeypatch.setattr(plugin, "attach", fail)
    plugin.register()
    made = engine_args.create_engine_config(SimpleNamespace())
    assert made.kv_transfer_config is None
    assert len(caplog.records) == 1
    assert "stock vLLM" in caplog.records[0].getMessage()


def test_a_vllm_without_engine_args_is_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm.engine.arg_utils

    monkeypatch.setenv("AITHER_KVCACHE_GRAPH", "1")
    monkeypatch.delattr(vllm.engine.arg_utils, "EngineArgs")
    plugin.register()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "declined", [{"prefix_caching": False}, {"encoder_decoder": True}], ids=["cache", "encoder"]
)
def test_engines_that_we_cannot_help_stay_stock(
    declined: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "sidecar_endpoint", lambda: pytest.fail("started for nothing"))
    made = config(**declined)
    plugin.attach(made)
    assert made.kv_transfer_config is None


@pytest.mark.parametrize("user", [None, "empty"])
def test_alone_it_takes_no_role_in_any_transfer(
    user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", ENDPOINT)
    monkeypatch.setenv(RESERVED, "1")
    made = config(None if user is None else transfer())
    plugin.attach(made)
    ours = made.kv_transfer_config
    assert ours.kv_connector == "KvGraphConnector"
    assert ours.kv_load_failure_policy == "recompute"
    assert ours.get_from_extra_config("kvgraph_endpoint", None) == ENDPOINT
    assert not any((ours.is_kv_transfer_instance, ours.is_kv_producer, ours.is_kv_consumer))


def test_the_users_own_configuration_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "sidecar_endpoint", lambda: ENDPOINT)
    user = transfer(
        kv_connector="OffloadingConnector", kv_role="kv_both", engine_id="engine-7",
        kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20},
    )  # fmt: skip
    made, before = config(user), repr(user)
    plugin.attach(made)
    assert made.kv_transfer_config is user
    assert repr(user) == before


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("tcp://10.0.0.5:5560", "beyond loopback"),
        ("tcp://sidecar.example:5560", "beyond loopback"),
        ("tcp://127.0.0.1:0", "needs a port"),
        ("udp://127.0.0.1:1", "is not an endpoint"),
        ("ipc://relative", "absolute path"),
    ],
)
def test_an_engine_does_not_tell_strangers_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, why: str
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", endpoint)
    with pytest.raises(ConfigError, match=f"AITHER_KVCACHE_SIDECAR='{endpoint}'.*{why}"):
        plugin.sidecar_endpoint()


def test_memory_for_copies_is_shared_with_the_workers_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight workers each commit what the variable says, and so does each data-parallel engine."""
    monkeypatch.setenv("AITHER_KVCACHE_WARM_GIB", "64")
    made = config()
    made.parallel_config.local_world_size = 4
    made.parallel_config.data_parallel_size_local = 2
    tiers = plugin.tiers_asked_for(made)
    assert tiers.sharers == 8
    made.parallel_config.data_parallel_size_local = 0  # this node has the frontend alone
    assert plugin.tiers_asked_for(made).sharers == 1


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Endpoints of the children that were started."""
    import kvgraph.hooks.sidecar

    started: list[str] = []

    def start_child() -> str:
        started.append(f"{ENDPOINT}-{len(started)}")
        return started[-1]

    monkeypatch.setattr(kvgraph.hooks.sidecar, "start_child", start_child)
    for name in ("AITHER_KVCACHE_SIDECAR", "AITHER_KVCACHE_CHILD"):
        monkeypatch.setenv(name, "")
    return started


def test_an_engine_that_an_engines_program_starts_has_a_child_of_its_own(
    children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plugin.sidecar_endpoint()
    assert plugin.sidecar_endpoint() == first, "the same program"
    assert children == [first]
    monkeypatch.setattr(os, "getpid", lambda: 1)  # a program that inherits the environment
    assert plugin.sidecar_endpoint() == children[1] != first


def test_an_engines_own_processes_share_its_child(
    children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plugin.sidecar_endpoint()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(plugin.multiprocessing, "parent_process", lambda: "an API server")
    assert plugin.sidecar_endpoint() == first


def test_what_the_user_sets_wins_over_an_inherited_child(
    children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.sidecar_endpoint()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", "tcp://127.0.0.1:5560")
    assert plugin.sidecar_endpoint() == "tcp://127.0.0.1:5560"


def test_an_engine_that_is_not_switched_on_loads_the_hooks_alone() -> None:
    """vLLM imports every plugin to ask it; what an engine then does not use it does not load."""
    program = (
        "import sys, kvgraph.hooks.vllm.plugin; "
        "print([m for m in sys.modules if m.startswith('kvgraph.') and 'hooks' not in m])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
