"""The page: files built from ``web``, and what a browser lets them do."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

PAGE: Final = Path(__file__).parent / "page"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Only files of this sidecar run or style anything, and nothing is sent elsewhere."""

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again, and answered with 304
    "Vary": "Accept, Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A built file as it is sent; ``tag`` is its ETag."""

    body: bytes
    packed: bytes
    media_type: str
    tag: str


@cache
def page_file(path: Path) -> PageFile:
    """A file of the page, read and compressed once."""
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    return PageFile(body, gzip.compress(body, mtime=0), _TYPES[path.suffix], tag)


def add_assets(app: FastAPI) -> None:
    """Serve what ``index.html`` names."""
    assets = {path.name: path for path in sorted((PAGE / "assets").glob("*"))}

    @app.get("/assets/{name}")
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise HTTPException(404, "no such file")
        return sent(page_file(assets[name]), request)


def index(request: Request) -> Response:
    """The page itself."""
    return sent(page_file(PAGE / "index.html"), request)


def wants_page(request: Request) -> bool:
    """Whether a browser asks, rather than a program that takes whatever there is."""
    return "text/html" in request.headers.get("accept", "")


def sent(file: PageFile, request: Request) -> Response:
    """``file``, compressed where the client takes that; 304 where it has it."""
    headers = {**_HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            file.packed, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type
        )
    return Response(file.body, headers=headers, media_type=file.media_type)
