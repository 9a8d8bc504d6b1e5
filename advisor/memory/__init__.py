"""``kvgraph memory``: an OpenAI-compatible address at which a chat outlives its token budget. Its
least valuable blocks leave the prompt, and come back behind the others when the user speaks of
them, so that the engine's recall finds their keys and values.
"""
