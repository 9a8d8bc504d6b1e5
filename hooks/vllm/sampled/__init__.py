"""Samples decode steps in a vLLM worker: the model's confidence, the blocks it attends to, and
embeddings of blocks.

``attach`` finds the model runner and gives it a ``StepSampler`` (``sampler``). On a sampled step
this patches the instance's sampler method and some attention layers' ``forward``, and ``measuring``
measures; other steps run unpatched. On a GPU the step runs without a full CUDA graph (``runners``)
and results are read back a step or more later; a sample's cost is how much later than usual the
next steps begin. Results travel to the scheduler with a step's output, where ``reporter`` makes
events of them.
"""
