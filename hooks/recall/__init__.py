"""Recall, without any engine: ``spans`` finds a prompt's text in copied blocks, ``cover`` chooses
which spans to splice, and ``gate`` stores how far a model's keys may move, by calibration.
"""
