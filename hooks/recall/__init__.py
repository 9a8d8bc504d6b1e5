"""Recall, without any engine: ``spans`` finds a prompt's text in copied blocks, ``cover`` chooses
which spans to splice, ``gate`` holds the calibration that says how far a model's keys may move.
"""
