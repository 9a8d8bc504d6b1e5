"""``kvgraph memory``: an OpenAI-compatible address at which a chat outlives its token budget.

A chat's messages become named blocks (``chat``). At the end of a turn the least valuable blocks
leave the prompt. When the user speaks again, the blocks that the message is about come back, after
the others and before what is new, so that the engine's recall finds their keys and values.
``chooser`` decides, ``proxy`` does this around each request, and ``store`` keeps chats.
"""
