"""``python -m kvgraph``: the same command line as ``kvgraph``."""

from .advisor.cli import main

if __name__ == "__main__":
    main()
