"""A sampled step on a GPU does without a CUDA graph with attention inside, and only that step does.

No GPU is needed: vLLM's own dispatchers say what would run, and the kernels run in emulation, under
what each architecture's driver would refuse.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvgraph.hooks.vllm.sampled import measuring as read_back
from kvgraph.hooks.vllm.sampled.measuring import (
    LayerQuery,
    SampledRequest,
    StepMeasurer,
    split_samples,
)
from kvgraph.hooks.vllm.sampled.runners import RunnerV1, RunnerV2
from kvgraph.hooks.vllm.sampled.sampler import SampledLayer, SamplingBudget, StepSampler, StepTimes
from kvgraph.kernels import ops
from kvgraph.kernels.backends import attention
from kvgraph.kernels.gpu.streams import Fence
from kvgraph.kernels.layout import GPU_LAYOUTS, PagedKv, gpu_layout, new_memory
from kvgraph.kernels.rope import Rope
from kvgraph_bench.selftest import emulation
from made_runner import (
    SIZES,
    MadeRunnerV1,
    MadeRunnerV2,
    graph_config,
    new_dispatcher,
    new_graph_manager,
    scheduled,
)
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("vllm_loaded")
MODES = ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
LEFT = {"PIECEWISE": "PIECEWISE", "FULL_AND_PIECEWISE": "PIECEWISE"}  # of a captured batch
STEP_S, EXTRA_S, SHARE = 0.02, 0.03, 0.02
BLOCKS, TOKENS, DIMS, HEADS = 12, 16, 64, 4
CONTEXT = 5 * TOKENS + 3


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """Host memory that says it is a GPU's."""

    is_cuda = True


class Late:
    """An event of a GPU that has got there when it is asked a second time."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 1


class Engine:
    """A made runner whose steps are sampled as on a GPU, by a clock of its own."""

    def __init__(
        self, config: Any, order: str = "LBNHC", runner: str = "V1", **fields: Any
    ) -> None:
        torch.manual_seed(5)
        self.cache = new_memory(gpu_layout(order, 3, BLOCKS, 2, TOKENS, DIMS, **fields))
        if self.cache.memory.is_floating_point():
            self.cache.memory.normal_()
        self.now = 0.0
        made, seen_as = {"V1": (MadeRunnerV1, RunnerV1), "V2": (MadeRunnerV2, RunnerV2)}[runner]
        self.runner: Any = made(config, self.cache, HEADS, CONTEXT - 1)
        self.times = StepTimes(lambda: self.now, SIZES)
        self.budget = SamplingBudget(lambda: self.now, self.times.busy, SHARE, strict=True)
        layers = [SampledLayer(at, impl) for at, impl in enumerate(self.runner.attention)]
        on_gpu = PagedKv(self.cache.memory.as_subclass(OnGpu), self.cache.layout)
        self.sampler = StepSampler(
            seen_as(self.runner), StepMeasurer(on_gpu, None), layers, self.budget,
            lambda: self.now, self.times,
        )  # fmt: skip
        self.sampler.attach()

    def run(self, seconds: float, requests: int = 3) -> None:
        end = self.now + seconds
        while self.now < end:
            called = sum(impl.calls for impl in self.runner.attention)
            self.runner.step(scheduled({f"r{n}": 1 for n in range(requests)}))
            eager = sum(impl.calls for impl in self.runner.attention) > called
            self.now += STEP_S + EXTRA_S * eager

    @property
    def samples(self) -> list[Any]:
        said = [each for each in self.runner.said if each is not None]
        return [
            sample for each in said for sample in split_samples(each.kv_connector_worker_meta)[1]
        ]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "mark", lambda device: Fence(Late()))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What runs in emulation, launch by launch."""
    calls: list[Any] = []
    run = emulation.run

    def noted(call: Any) -> None:
        calls.append(call)
        run(call)

    monkeypatch.setattr(emulation, "run", noted)
    monkeypatch.setattr(ops, "observer", lambda cache: emulation)
    return calls


# Dispatchers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requests", [1, 3, 8, 9])
def test_the_dispatcher_answers_without_a_graph_that_has_attention_inside(
    paper_config: Any, mode: str, requests: int
) -> None:
    dispatcher = new_dispatcher(graph_config(paper_config, mode))
    view = RunnerV1.without_full_graph
    for uniform in (True, False):
        asked = {"num_tokens": requests, "uniform_decode": uniform, "invalid_modes": None}
        stock, _ = dispatcher.dispatch(**asked)
        found, batch = view(SimpleNamespace(), dispatcher.dispatch, **asked)  # type: ignore[arg-type]
        captured = requests <= SIZES[-1]
        assert found.name == (LEFT.get(mode, "NONE") if captured else "NONE")
        assert batch.num_tokens >= requests
        if stock.name != "FULL":
            assert (found, batch) == dispatcher.dispatch(**asked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requests", [1, 3, 8, 9])
def test_the_second_runners_dispatcher_does_so_too(
    paper_config: Any, mode: str, requests: int
) -> None:
    from vllm.v1.worker.gpu import cudagraph_utils

    manager = new_graph_manager(graph_config(paper_config, mode))
    asked = (requests, requests, 1)
    how = {"num_active_loras": 0, "max_query_len": 1}
    stock = manager.dispatch(*asked, **how)
    view = RunnerV2.without_full_graph
    found = view(SimpleNamespace(), manager.dispatch, *asked, **how)  # type: ignore[arg-type]
    captured = requests <= SIZES[-1]
    assert found.cg_mode.name == (LEFT.get(mode, "NONE") if captured else "NONE")
    if stock.cg_mode.name != "FULL":
        assert found == stock
    elif found.cg_mode.name == "NONE":
        eager = cudagraph_utils.BatchExecutionDescriptor(found.cg_mode, requests, requests)
        assert found == eager, "what vLLM itself says of a batch without a graph"


# Steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.usefixtures("late", "emulated")
def test_only_the_step_that_is_sampled_leaves_its_graph(
    paper_config: Any, mode: str, runner: str
) -> None:
    engine = Engine(graph_config(paper_config, mode), runner=runner)
    engine.run(10.0)
    modes, left = engine.runner.modes, LEFT.get(mode, "NONE")
    assert engine.budget.steps >= 2
    assert set(modes) == {"FULL", left}
    assert modes.count(left) in (engine.budget.steps, engine.budget.steps + 1)
    assert "dispatch" not in vars(dispatcher_of(engine.runner))
    assert len(engine.samples) == 3 * modes.count(left)
    assert all(0 <= each.confidence <= 1 for each in engine.samples)


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.usefixtures("late", "emulated")
def test_what_was_measured_is_told_with_a_later_step_and_never_awaited(
    paper_config: Any, runner: str
) -> None:
    engine = Engine(graph_config(paper_config, "FULL_AND_PIECEWISE"), runner=runner)
    engine.run(6.0)
    sampled = [at for at, mode in enumerate(engine.runner.modes) if mode == "PIECEWISE"]
    told = [at for at, each in enumerate(engine.runner.said) if each is not None]
    assert sampled
    assert told == [at + 1 for at in sampled]


@pytest.mark.usefixtures("late", "emulated")
def test_samples_keep_to_their_share_of_the_time_whatever_they_cost(paper_config: Any) -> None:
    engine = Engine(graph_config(paper_config, "FULL_DECODE_ONLY"))
    engine.run(30.0)
    eager = engine.runner.modes.count("NONE")
    assert eager > 5
    assert eager * EXTRA_S <= SHARE * engine.now + EXTRA_S
    assert engine.budget.spent_s == pytest.approx(engine.budget.steps * EXTRA_S, rel=0.05)


@pytest.mark.usefixtures("late", "emulated")
def test_steps_that_do_more_than_decode_are_not_sampled(paper_config: Any) -> None:
    engine = Engine(graph_config(paper_config, "FULL_DECODE_ONLY"))
    engine.run(2.0)
    for _ in range(600):
        engine.runner.step(scheduled({"r0": 1, "r1": 1, "new": 6}, new=True))
        engine.now += STEP_S
    assert not engine.budget.steps
    assert "dispatch" not in vars(dispatcher_of(engine.runner))


@pytest.mark.usefixtures("late", "emulated")
@pytest.mark.parametrize("where", ["dispatch", "look", "measure", "hand"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_after_an_error_of_ours_all_is_as_vllm_made_it(
    paper_config: Any, where: str, runner: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine = Engine(graph_config(paper_config, "FULL_AND_PIECEWISE"), runner=runner)
    view = RunnerV1 if runner == "V1" else RunnerV2

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("secret")

    owner, name = {
        "dispatch": (view, "without_full_graph"),
        "look": (view, "batch"),
        "measure": (StepMeasurer, "begin"),
        "hand": (view, "hand"),
    }[where]
    monkeypatch.setattr(owner, name, fail)
    engine.run(6.0)
    lines = [each for each in caplog.messages if "sampled no more after ValueError" in each]
    assert len(lines) == 1
    assert "secret" not in caplog.text
    shadowed = {"execute_model", "sample_tokens", "prepare_inputs", "dispatch", "forward", "sample"}
    made = engine.runner
    for each in (made, dispatcher_of(made), made.sampler, *made.attention):
        assert not shadowed & set(vars(each))
    assert not engine.samples
    assert made.modes.count("PIECEWISE") == (where != "dispatch")


def dispatcher_of(runner: Any) -> Any:
    return getattr(runner, "cudagraph_dispatcher", None) or runner.cudagraph_manager


# Kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", GPU_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sampled_step_is_launched_as_drivers_allow_it_and_measures_what_torch_does(
    paper_config: Any, order: str, dtype: Any, late: None, emulated: list[Any]
) -> None:
    engine = Engine(graph_config(paper_config, "FULL_DECODE_ONLY"), order, dtype=dtype)
    while not engine.samples or not engine.samples[-3].mass:
        emulated.clear()
        engine.run(1.0)
    assert [call.kernel for call in emulated] == ["confidence"] + ["attention_mass"] * 3
    chosen = engine.samples[-3]
    mass = torch.frombuffer(bytearray(chosen.mass), dtype=torch.float32)
    assert torch.allclose(mass, want(engine.cache, emulated), atol=1e-4)


class Reads(TorchDispatchMode):
    """Notes what would wait for a GPU: values that are read from tensors, and masks as indices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Reads:
        self._stock = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}
        for name, stock in self._stock.items():
            setattr(torch.Tensor, name, self._noted(name, stock))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        for name, stock in self._stock.items():
            setattr(torch.Tensor, name, stock)
        super().__exit__(*error)

    def _noted(self, name: str, stock: Any) -> Any:
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.found.append(name)
            return stock(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.name().startswith("aten::index") and "torch.bool" in {
            str(each.dtype) for each in (args[1] if len(args) > 1 else ()) if each is not None
        }
        if masks or func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_would_wait_is_noticed() -> None:
    tensor = torch.randn(3)
    for read in (float, lambda one: [*one[None][tensor[:1] > 0]], lambda one: one.tolist()):
        with Reads() as reads:
            read(tensor[0])
        assert reads.found


@pytest.mark.usefixtures("emulated")
def test_nothing_is_read_while_a_step_is_measured() -> None:
    plain = new_memory(gpu_layout("LBNHC", 3, BLOCKS, 2, TOKENS, DIMS))
    rope = Rope(1e4 ** -(torch.arange(DIMS // 2, dtype=torch.float64) * 2 / DIMS))
    measuring = StepMeasurer(PagedKv(plain.memory.as_subclass(OnGpu), plain.layout), rope)
    looks = [LayerQuery(layer, torch.randn(HEADS, DIMS), 0.1) for layer in range(3)]
    table, logits = torch.arange(BLOCKS, dtype=torch.int32), torch.randn(3, 500)
    for turn in range(12):
        with Reads() as reads:
            measured = measuring.begin("abc", logits, 1, SampledRequest(looks, table, CONTEXT))
        assert reads.found == []
        said = measuring.samples(measured)[0]
        assert len(said.places) == {8: 4, 9: 1}.get(turn, 0), "five full blocks, once the mean is"


def want(cache: PagedKv, calls: list[Any]) -> Any:
    """Masses of the looks that were launched, by torch."""
    blocks = torch.arange(-(-CONTEXT // TOKENS))[None]
    lengths = torch.tensor([CONTEXT])
    masses = []
    for layer, call in enumerate(call for call in calls if call.kernel == "attention_mass"):
        query = call.held[2]
        masses.append(attention.attention_mass(cache, layer, query, blocks, lengths, DIMS**-0.5)[0])
    return torch.stack(masses).mean(0)[: CONTEXT // TOKENS]
