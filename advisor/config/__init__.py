"""Configuration from a TOML file, the environment and the command line."""
