"""An agent of LangGraph says what it waits for: a tool, then a person. A stand-in serves its model.

python examples/langgraph_agent.py ENDPOINT URL    # of a running `kvgraph serve`, as its log says
"""

from __future__ import annotations

import sys
import time
from typing import Any

from kvgraph import FakeEngine, LangGraphCallbacks
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

SIZE = 16  # tokens per block
asks = ToolCall(name="search", args={"what": "eviction"}, id="1")
model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=[asks]), AIMessage("Found.")]))
if len(sys.argv) != 3:
    sys.exit(__doc__)
endpoint, url = sys.argv[1:]
signals = LangGraphCallbacks(url)


@tool
def search(what: str) -> str:
    """Search for something."""
    time.sleep(2)  # meanwhile the sidecar knows that chat-7 waits for `search`
    return f"{what}: see there"


def ask_model(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    """Ask under the thread's name; a real model is given hints(session=…) as its extra_body."""
    tokens = list(range(SIZE * (1 + len(state["messages"]))))
    engine.run(tokens, session=config["configurable"]["thread_id"])
    return {"messages": [model.invoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("model", ask_model)
builder.add_node("tools", ToolNode([search]))
builder.add_edge(START, "model")
builder.add_conditional_edges("model", tools_condition)
builder.add_edge("tools", "model")
graph = builder.compile(checkpointer=signals.watch(InMemorySaver()))

with FakeEngine(endpoint, block_size=SIZE) as engine:
    chat: RunnableConfig = {"configurable": {"thread_id": "chat-7"}, "callbacks": [signals]}
    said = graph.invoke({"messages": [HumanMessage("What goes first?")]}, chat)
    print(said["messages"][-1].content)
    time.sleep(1)  # a word is told half a second after it was said
signals.close()
