"""The part of kvgraph that runs inside an engine: it reports blocks, follows advice, and never
delays a step.

``link`` talks to the sidecar, ``requests`` reads what a request is made of, and ``tiers`` knows no
vLLM; ``vllm`` alone imports it. Hooks for another engine would stand beside ``vllm``.
"""
