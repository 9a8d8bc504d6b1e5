"""Answers the page's questions: ``dashboards.api.page_source.PageSource`` over a live sidecar."""
