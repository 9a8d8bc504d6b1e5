"""What the page's HTTP API answers with: one frozen model per path. See ``dashboards.api``."""
