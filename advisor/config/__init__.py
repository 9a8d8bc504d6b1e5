"""Configuration: a TOML file, the environment, the command line; checked once, then frozen.

What is wrong is said in one line that a person can act on; a file that changes is read again, and
taken only if it is good.
"""
