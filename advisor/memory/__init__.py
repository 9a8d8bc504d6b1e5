"""``kvgraph memory``: an OpenAI-compatible address at which a chat outlives its token budget.

A chat's messages become named blocks (``chats``). At the end of a turn, those worth least leave the
prompt; when the user speaks again, those that it is about come back, behind the others and before
what is new, so that the engine's recall finds their keys and values. ``memory_proxy`` does this
around each request.
"""
