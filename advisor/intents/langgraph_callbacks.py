"""``LangGraphCallbacks``: tells a sidecar what LangGraph's threads are waiting for.

signals = LangGraphCallbacks()                       # of this user's only sidecar
graph.invoke(state, {"configurable": {"thread_id": "chat-7"}, "callbacks": [signals]})
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from .intent_client import IntentClient
from .session_words import SessionWords

try:
    from langchain_core.callbacks import BaseCallbackHandler
except ImportError as error:
    raise ImportError(f"{error}; run: pip install 'kvgraph[langgraph]'") from None

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver

    Saver = TypeVar("Saver", bound=BaseCheckpointSaver[Any])

_MOST_RUNS: Final = 4096  # whose end is awaited: what is cancelled has none; chosen


class LangGraphCallbacks(BaseCallbackHandler):
    """A callback handler of LangChain, which LangGraph's graphs and LangChain's agents call.

    A session is called what its thread is (``thread_id``); requests have to carry the same name,
    by ``hints(session=thread_id)``. While a tool runs, the session waits for that tool. When a run
    of the graph is over, has failed or is interrupted, it waits for a person. Runs without a
    thread are passed over. Nothing here waits for a sidecar or raises; see ``SessionWords``.

    Args:
        url: The sidecar's; None: that of this user's only one.
        token: The sidecar's; None: that of its runtime note, or the environment's.
        tenant: Whose sessions they are, if requests say it.

    Raises:
        ImportError: ``kvgraph[langgraph]`` is not installed.
    """

    run_inline = True  # in the order of events, and not by a pool of threads: nothing takes time

    def __init__(
        self, url: str | None = None, token: str | None = None, tenant: str | None = None
    ) -> None:
        self._words = SessionWords(lambda: IntentClient(url, token), tenant)
        self._graphs: OrderedDict[UUID, str] = OrderedDict()  # thread by run, of whole graphs
        self._tools: OrderedDict[UUID, str] = OrderedDict()

    @property
    def ignore_llm(self) -> bool:
        """True: an engine sees requests itself, and tokens are many."""
        return True

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note which thread a graph's run is of."""
        if parent_run_id is None:
            _begin(self._graphs, run_id, metadata)

    def on_chain_end(self, outputs: dict[str, Any], *, run_id: UUID, **kwargs: Any) -> None:
        """Say that somebody reads what a graph's run came to, or is asked by its interrupt."""
        if (thread := self._graphs.pop(run_id, None)) is not None:
            self._words.turn_ended(thread)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Say the same of one that failed."""
        if (thread := self._graphs.pop(run_id, None)) is not None:
            self._words.turn_ended(thread)

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Say that a thread waits for a tool; what the tool is asked stays here."""
        if (thread := _begin(self._tools, run_id, metadata)) is not None:
            self._words.waits(thread, (serialized or {}).get("name"))

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Say nothing more of a tool that was quick, unless another one runs."""
        thread = self._tools.pop(run_id, None)
        if thread is not None and thread not in self._tools.values():
            self._words.goes_on(thread)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Do as for a tool that ended; an interrupt is told when the graph's run ends by it."""
        self.on_tool_end(None, run_id=run_id)

    def thread_deleted(self, thread_id: str) -> None:
        """Say that a thread's session is over."""
        self._words.ended(thread_id)

    def watch(self, checkpointer: Saver) -> Saver:
        """Say it for each thread that ``checkpointer`` deletes from now on; returns it."""
        delete, adelete = checkpointer.delete_thread, checkpointer.adelete_thread

        def deleting(thread_id: str) -> None:
            delete(thread_id)
            self.thread_deleted(thread_id)

        async def adeleting(thread_id: str) -> None:
            await adelete(thread_id)
            self.thread_deleted(thread_id)

        vars(checkpointer).update(delete_thread=deleting, adelete_thread=adeleting)
        return checkpointer

    def close(self, wait_s: float = 1.0) -> None:
        """Tell what is left to tell before a program ends; waits for ``wait_s`` seconds at most."""
        self._words.close(wait_s)


def _begin(
    runs: OrderedDict[UUID, str], run_id: UUID, metadata: Mapping[str, Any] | None
) -> str | None:
    """Note a run's thread, and return it; None if it has none."""
    thread = (metadata or {}).get("thread_id")
    if thread is None or thread == "":
        return None
    runs[run_id] = str(thread)
    if len(runs) > _MOST_RUNS:
        runs.popitem(last=False)
    return runs[run_id]
