"""The hooks for vLLM: a plugin that adds one KV connector, and what stands behind it.

``plugin`` and ``connector`` are named by vLLM and stay where they are. An engine that is not
switched on imports no more than this folder's settings and the plugin's installers.
"""
