"""The page's questions, answered: ``dashboards.api.page_source.PageSource`` over a live sidecar."""
