"""Configuration from a TOML file, the environment and the command line; validated, then frozen.

An error is one line that names the key and what is allowed. A changed file is reloaded only if
valid.
"""
