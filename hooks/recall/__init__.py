"""Recall, without any engine: finds a prompt's text in other prompts' copied blocks.

``spans`` indexes the tokens of blocks, ``cover`` chooses which found spans to splice into a prompt,
and ``gate`` holds the calibration that says how far a model's keys may move.
"""
