"""``LangGraphCallbacks``: reports to a sidecar what LangGraph threads are waiting for.

signals = LangGraphCallbacks()                       # of this user's only sidecar
graph.invoke(state, {"configurable": {"thread_id": "chat-7"}, "callbacks": [signals]})
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from uuid import UUID

from ...graph.errors import KvGraphError
from .client import IntentClient

logger = logging.getLogger(__name__)

Signal = Callable[[IntentClient], Any]

# Engines report the ends of requests five times per second, and a busy sidecar applies them later.
# A signal counts only while no request of its session runs. Chosen, as for ``kvgraph precache``.
SETTLE_S: Final = 0.5
_MOST: Final = 1024  # sessions whose signals wait to be sent; chosen
_NAME: Final = 256  # characters of a name, the length to which request hints are cut
_REST_S: Final = 10.0  # pause after a sidecar did not answer; chosen


class _Due(NamedTuple):
    at: float  # when it is due, in monotonic seconds
    signal: Signal
    waits: bool  # whether it states that the session waits for a tool
    again: bool = False  # it was sent before, to a sidecar that did not know the session yet


class SessionSignals:
    """Sends a sidecar the latest signal of each session, half a second after it was given.

    Callers never wait and get no error: a signal goes into a bounded table, where a newer signal of
    its session replaces it. A busy sidecar may not know a session yet: then the signal is sent once
    more, after the same delay. If no sidecar answers, signals are dropped for ten seconds, with one
    log line until one answers again.
    """

    def __init__(
        self,
        connect: Callable[[], IntentClient] = IntentClient,
        tenant: str | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._connect, self._tenant, self._settle_s = connect, tenant, settle_s
        self._signals: OrderedDict[str, _Due] = OrderedDict()  # the first due first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._client: IntentClient | None = None
        self._silent_until = 0.0
        self._logged: set[str] = set()

    def waits(self, session: str, tool: str | None) -> None:
        """Signal that a session waits for a tool; ``tool`` is None if it has no name."""
        name, tool = session[:_NAME], (tool or "")[:_NAME] or None
        self._put(session, lambda to: to.waiting(name, tool, tenant=self._tenant), waits=True)

    def goes_on(self, session: str) -> None:
        """Cancel the signal that a session waits for a tool, if it was not sent yet."""
        with self._changed:
            if session in self._signals and self._signals[session].waits:
                del self._signals[session]

    def turn_ended(self, session: str) -> None:
        """Signal that a session's turn ended, and that a person reads the answer."""
        self._put(session, lambda to: to.turn_ended(session[:_NAME], self._tenant))

    def ended(self, session: str) -> None:
        """Signal that a session has ended and will not return."""
        self._put(session, lambda to: to.ended(session[:_NAME], self._tenant))

    def close(self, wait_s: float = 1.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(wait_s)

    def _put(self, session: str, signal: Signal, waits: bool = False) -> None:
        with self._changed:
            if session in self._signals:
                del self._signals[session]
            elif len(self._signals) >= _MOST:
                self._signals.popitem(last=False)
            self._signals[session] = _Due(time.monotonic() + self._settle_s, signal, waits)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="kvgraph-words", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                    self._thread.start()
            self._changed.notify()

    # On the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (following := self._next()) is not None:
            if time.monotonic() >= self._silent_until:
                self._send(*following)

    def _next(self) -> tuple[str, _Due] | None:
        """Wait for the next due signal; None once all are sent after ``close``."""
        with self._changed:
            while True:
                first = next(iter(self._signals.values()), None)
                due_s = first.at - time.monotonic() if first is not None else None
                if first is not None and (self._closing or (due_s or 0.0) <= 0):
                    return self._signals.popitem(last=False)
                if self._closing:
                    return None
                self._changed.wait(due_s)

    def _send(self, session: str, due: _Due) -> None:
        try:
            self._client = self._client or self._connect()
            answer = due.signal(self._client)["answer"]
        except Exception as error:  # whatever it is, the agent goes on
            self._client, self._silent_until = None, time.monotonic() + _REST_S
            reason = error if isinstance(error, KvGraphError) else type(error).__name__
            self._log("silent", "kvgraph: signals are dropped: %s", reason)
            return
        self._logged.discard("silent")
        if answer == "missing" and not self._queue_again(session, due):
            self._log(
                "missing",
                "kvgraph: the sidecar knows no session of an agent's name; do "
                "its requests carry kvgraph.hints(session=…)?",
            )

    def _queue_again(self, session: str, due: _Due) -> bool:
        """Queue a signal once more; returns whether the session has a pending one."""
        with self._changed:
            if session not in self._signals and not due.again and not self._closing:
                at = time.monotonic() + self._settle_s
                self._signals[session] = due._replace(at=at, again=True)
            return session in self._signals

    def _log(self, what: str, message: str, *values: object) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(message, *values)


try:
    from langchain_core.callbacks import BaseCallbackHandler
except ImportError as error:
    raise ImportError(f"{error}; run: pip install 'kvgraph[langgraph]'") from None

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver

    Saver = TypeVar("Saver", bound=BaseCheckpointSaver[Any])

_MOST_RUNS: Final = 4096  # runs whose end is awaited, since cancelled ones have none; chosen


class LangGraphCallbacks(BaseCallbackHandler):
    """A LangChain callback handler, for LangGraph graphs and LangChain agents.

    A session's name is its thread's (``thread_id``); requests must carry the same name, by
    ``hints(session=thread_id)``. While a tool runs, the session waits for that tool. When a run of
    the graph ends, fails or is interrupted, it waits for a person. Runs without a thread are
    ignored. No callback waits for a sidecar or raises; see ``SessionSignals``.

    Args:
        url: The sidecar's URL; None: that of this user's only sidecar.
        token: The sidecar's token; None: from its runtime note or the environment.
        tenant: The sessions' tenant, if requests state it.

    Raises:
        ImportError: ``kvgraph[langgraph]`` is not installed.
    """

    run_inline = True  # in the order of events, and not in a thread pool; callbacks are fast

    def __init__(
        self, url: str | None = None, token: str | None = None, tenant: str | None = None
    ) -> None:
        self._signals = SessionSignals(lambda: IntentClient(url, token), tenant)
        # Each step of an OrderedDict is atomic: callbacks come from several threads.
        self._graphs: OrderedDict[UUID, str] = OrderedDict()  # thread by run, of whole graphs
        self._tools: OrderedDict[UUID, str] = OrderedDict()

    @property
    def ignore_llm(self) -> bool:
        """True: the engine sees requests itself, and there are many tokens."""
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
        """Remember the thread of a graph's run."""
        if parent_run_id is None:
            _begin(self._graphs, run_id, metadata)

    def on_chain_end(self, outputs: dict[str, Any], *, run_id: UUID, **kwargs: Any) -> None:
        """Signal that a person reads the run's result, or is asked by its interrupt."""
        if (thread := self._graphs.pop(run_id, None)) is not None:
            self._signals.turn_ended(thread)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Signal that a person reads the error of a failed run."""
        if (thread := self._graphs.pop(run_id, None)) is not None:
            self._signals.turn_ended(thread)

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Signal that a thread waits for a tool; the tool's input is not sent."""
        if (thread := _begin(self._tools, run_id, metadata)) is not None:
            self._signals.waits(thread, (serialized or {}).get("name"))

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Cancel the signal of a tool that was quick, unless another one runs."""
        thread = self._tools.pop(run_id, None)
        if thread is not None and thread not in self._tools.values():
            self._signals.goes_on(thread)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End the wait for a failed tool; an interrupt is signalled when the graph's run ends."""
        self.on_tool_end(None, run_id=run_id)

    def thread_deleted(self, thread_id: str) -> None:
        """Signal that a thread's session has ended."""
        self._signals.ended(thread_id)

    def watch(self, checkpointer: Saver) -> Saver:
        """Signal ``thread_deleted`` for each thread that ``checkpointer`` deletes from now on;
        returns the checkpointer.
        """
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
        """Send pending signals before a program ends; waits at most ``wait_s`` seconds."""
        self._signals.close(wait_s)


def _begin(
    runs: OrderedDict[UUID, str], run_id: UUID, metadata: Mapping[str, Any] | None
) -> str | None:
    """Remember and return a run's thread; None if it has none."""
    thread = (metadata or {}).get("thread_id")
    if thread is None or thread == "":
        return None
    runs[run_id] = str(thread)
    if len(runs) > _MOST_RUNS:
        runs.popitem(last=False)
    return str(thread)
