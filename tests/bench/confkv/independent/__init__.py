"""The rivals beside an implementation of other people: NVIDIA's ``kvpress``."""
