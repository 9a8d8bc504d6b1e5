"""What sampled decode steps show: how sure the model is, which blocks it attends to, what they say.

``runner_hook`` puts a ``StepSampler`` on the worker's model runner, where that is asked for. On a
sampled step it shadows the sampler's ``forward`` and those of some attention layers, and measures;
on any other step nothing is shadowed. What it measured travels back with the step's output
(``sample_words``), and becomes events in the scheduler's process (``sample_reporter``).
"""
