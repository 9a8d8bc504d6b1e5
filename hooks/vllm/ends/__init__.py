"""Why an answer ended, read off its own last tokens: a tool call, or the end of a turn.

What the tokens mean is learned in the process that makes an engine's configuration (``api/``), and
handed to the scheduler's process as ``EndMarks``.
"""
