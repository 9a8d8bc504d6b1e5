"""The hooks for vLLM: a plugin that adds one KV connector, and what stands behind it."""
