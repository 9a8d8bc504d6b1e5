"""What runs inside an engine: observe its blocks, take advice, never get in its way.

``client`` is the engine's end of the wire; ``tiers`` knows no vLLM, ``vllm`` is the only folder
that imports it. Another engine's hooks would stand beside it, in ``transformers`` for example.
"""
