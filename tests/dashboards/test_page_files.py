"""The page as it is sent: to browsers, from files, under a policy that runs nothing else."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from kvgraph.dashboards.access import PAGE, POLICY
from page_app import create_app

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MOST_BYTES = 600_000  # of all files, compressed


@pytest.fixture
def client() -> TestClient:
    app = create_app(cast(Any, None), {"127.0.0.1"}, "token")
    return TestClient(app, "http://127.0.0.1:8000")


def test_a_browser_gets_the_page_and_a_program_what_there_is(client: TestClient) -> None:
    page = client.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert '<div id="page">' in page.text
    assert "/healthz" in client.get("/").json()["see"]


def test_every_file_that_the_page_names_is_served(client: TestClient) -> None:
    names = re.findall(r'(?:src|href)="\./(assets/[^"]+)"', client.get("/", headers=BROWSER).text)
    assert {Path(name).suffix for name in names} == {".js", ".css", ".svg"}
    for name in names:
        assert client.get(f"/{name}").status_code == 200
    assert client.get("/assets/nothing.js").status_code == 404
    assert client.get("/assets/..%2Findex.html").status_code == 404


def test_the_policy_allows_only_files_of_this_sidecar(client: TestClient) -> None:
    for path in ("/", "/assets/page.js"):
        headers = client.get(path, headers=BROWSER).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_what_a_browser_has_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/assets/page.js")
    assert first.headers["content-encoding"] == "gzip"
    tag = first.headers["etag"]
    again = client.get("/assets/page.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_is_small_and_names_no_other_host() -> None:
    files = [path for path in PAGE.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= MOST_BYTES
    html = (PAGE / "index.html").read_text()
    assert "://" not in html
    assert "<style" not in html
    assert not re.search(r"<script(?![^>]*src=)", html)
