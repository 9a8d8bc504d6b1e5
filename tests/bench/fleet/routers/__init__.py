"""Our router beside others, on real engines: ``kvgraph bench fleet --part routers``."""
