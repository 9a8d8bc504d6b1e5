"""``kvgraph top``: the page's first screen in a terminal, as it changes."""
