"""The part of kvgraph that runs inside an engine: it reports blocks, follows advice, and never
delays a step. ``vllm`` alone imports vLLM; hooks for another engine would stand beside it.
"""
