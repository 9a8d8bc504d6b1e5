"""Configuration: a TOML file, the environment, the command line; checked once, then frozen.

An error is one line that a person can act on. A file that changes is read again, and taken only if
it is valid.
"""
