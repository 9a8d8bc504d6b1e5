"""What runs inside an engine: it observes blocks, takes advice, and never delays the engine.

``client`` is the engine's end of the wire; ``tiers`` knows no vLLM, ``vllm`` is the only folder
that imports it. Another engine's hooks would be beside it, for example in ``transformers``.
"""
