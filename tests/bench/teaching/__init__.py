"""How the small models that ship with the repository are made, and made again by one command."""
