"""``kvgraph memory``: an OpenAI-compatible address at which a chat outlives its token budget. Its
least valuable blocks leave the prompt, and come back after the others when the user refers to them,
so that the engine's recall finds their keys and values.
"""
