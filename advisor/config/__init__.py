"""Configuration from a TOML file, the environment and the command line; a changed file is reloaded
only if valid.
"""
