"""The hooks for vLLM, which names ``plugin`` and ``connector``: they stay where they are. An engine
that is not switched on imports no more than this folder's settings and the plugin's installers.
"""
