"""What sampled decode steps show: how sure the model is, which blocks it attends to, what they say.

``runner_hook`` puts a ``StepSampler`` on the worker's model runner, where that is asked for. On a
sampled step it shadows the sampler's method that takes logits and the ``forward`` of some attention
layers, and measures; on any other step nothing is shadowed. On a GPU it also has the runner's own
dispatcher answer for that one step as if no CUDA graph had attention inside (``runners``), reads
back what was measured with a later step (``read_back``), and takes for the cost how much later than
usual the next steps begin (``step_times``). What was measured travels back with a step's output
(``sample_words``), and becomes events in the scheduler's process (``sample_reporter``).
"""
