"""How vLLM's classes are patched, and the list of all patches applied."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

logger = logging.getLogger(__name__)

Method = Callable[..., Any]

PATCHES: Final = {
    "EngineArgs.create_engine_config": "attaches an engine to a sidecar",
    "EngineArgs.from_cli_args": "notes the chat template that a server is given",
    "KVConnectorFactory.create_connector": "observes an engine beside its user's connector",
    "Executor.init_kv_output_aggregator": "lets workers that move nothing answer as in stock vLLM",
    "Scheduler.__init__": "holds new sessions in overload",
    "EngineCore.collective_rpc": "notes that workers may have got other weights",
    "EngineCore.set_weight_version": "notes that they have got other weights",
    "EngineCoreProc.run_busy_loop": "wakes an idle engine for prefetches",
    "DPEngineCoreProc.run_busy_loop": "wakes an idle engine for prefetches",
    "GPUModelRunner.initialize_kv_cache": "samples decode steps",
    "BaseRenderer.render_chat": "marks a chat's layers",
    "BaseRenderer.render_chat_async": "marks a chat's layers",
    "InputProcessor.process_inputs": "hands a chat's marks over to the engine",
    "AnthropicServingMessages.create_messages": "notes a client's own messages",
    "OpenAIServingResponses.create_responses": "notes a client's own messages",
}
"""Every method of vLLM's classes that is replaced while we are switched on, and what for.

Methods of single objects are shadowed besides: a block pool's (``PoolTap``), a sampled model
runner's (``MethodPatches``), and those of a connector of the user's (``patches.observed_class``).
"""

_MARK: Final = "_kvgraph_wrapped"
_applied: Final[list[tuple[type, str, Any]]] = []  # what vLLM's class had under that name


def is_patched(owner: type, name: str) -> bool:
    return hasattr(getattr(owner, name), _MARK)


def patch(owner: type, name: str, make: Callable[[Method], Method]) -> None:
    """Replace ``owner.name``, once, by the result of ``make`` on vLLM's own function.

    Static and class methods stay such: ``make`` gets the underlying function, with its ``cls``.
    Raises AttributeError or KeyError.
    """
    if (patched := f"{owner.__qualname__}.{name}") not in PATCHES:
        raise KeyError(f"{patched} is not in the list of patches")
    found = inspect.getattr_static(owner, name)
    original = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    if hasattr(original, _MARK):
        return
    ours = functools.wraps(original)(make(original))
    setattr(ours, _MARK, True)
    _applied.append((owner, name, found))
    method: Any = type(found)
    setattr(owner, name, method(ours) if found is not original else ours)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """On exit, undo the patches of vLLM's classes made inside the context."""
    before = len(_applied)
    try:
        yield
    finally:
        while len(_applied) > before:
            setattr(*_applied.pop())


def after(owner: type, name: str, then: Method, lost: str) -> None:
    """Call ``then(result, *args)`` after each ``owner.name(*args)`` from now on. An exception that
    it raises is logged as ``kvgraph: {lost}``, and vLLM gets its own result.
    """

    def followed(original: Method) -> Method:
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                then(result, *args, **kwargs)
            except Exception as error:
                logger.warning("kvgraph: %s (%s: %s)", lost, type(error).__name__, error)
            return result

        return method

    patch(owner, name, followed)
