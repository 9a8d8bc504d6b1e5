"""``/v1/docs``: the OpenAPI document as one page without scripts, which works offline."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, Response

_ABOUT: Final = """The HTTP API of the page: versioned, typed, and all that the page knows.

Every path is below ``/v1`` and answers ``GET`` with JSON of the model that its path names (the
schema is served at ``/v1/openapi.json``). What holds for all of them:

* A block is its key as ``0x`` and 16 hexadecimal digits, since JavaScript cannot hold 64 bits; a
  session, tenant, request or engine is its name, as text that anybody may have chosen: show it as
  text and never as HTML. No prompt text and no token id is known here.
* Times named ``at`` and lists named ``starts`` are Unix seconds; what ends in ``_s`` is a duration
  in seconds. ``at`` of an answer says when it was true.
* ``None`` (null) means that nobody knows, which is not zero.
* Records of the logs have an ``id`` that rises by one; ``before`` pages backwards and ``next`` is
  what to ask for then. The logs are rings: what is older than they reach is gone.
* Without the token 401; unknown things 404; wrong input 400 or 422; what cannot be answered just
  now 503 with ``Retry-After``. Each has a ``detail`` in words. See ``dashboards.access`` for the
  token and its cookie.
"""
_STYLE: Final = (
    ":root{color-scheme:light dark}"
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font-family:ui-monospace,monospace}pre{white-space:pre-wrap}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;vertical-align:top;padding:.2rem .6rem;border-top:1px solid #8886}"
    "section{margin:1.5rem 0}"
)
# The page runs nothing, loads nothing and is styled by its own text alone.
POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)

_MODELS: Final = "#/components/schemas/"


def docs_page(schema: Mapping[str, Any]) -> str:
    """An HTML page that names every path, parameter and field of an OpenAPI document."""
    title = f"{schema['info']['title']} API, version {schema['info']['version']}"
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width"><style>' + _STYLE + "</style>",
            f"</head><body><h1>{escape(title)}</h1><pre>{escape(_ABOUT)}</pre>",
            '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
            "<h2>Paths</h2>",
            *_paths(schema["paths"]),
            "<h2>Models</h2>",
            *_models(schema["components"]["schemas"]),
            "</body></html>",
        )
    )


def _paths(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            yield f"<section><h3><code>{method.upper()} {escape(path)}</code></h3>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            yield from _parameters(operation.get("parameters", ()))
            if "requestBody" in operation:
                yield f"<p>Takes {_body(operation['requestBody'])}.</p>"
            yield f"<p>Answers with {_body(operation['responses']['200'])}.</p></section>"


def _parameters(parameters: Any) -> Iterator[str]:
    if not parameters:
        return
    yield "<table><tr><th>parameter</th><th>in</th><th>type</th></tr>"
    for each in parameters:
        must = ", required" if each.get("required") else ""
        yield (
            f"<tr><td><code>{escape(each['name'])}</code></td><td>{escape(each['in'])}{must}</td>"
            f"<td>{_type(each['schema'])}</td></tr>"
        )
    yield "</table>"


def _body(told: Mapping[str, Any]) -> str:
    kinds = told.get("content", {}).items()
    return " or ".join(f"{escape(name)}: {_type(kind['schema'])}" for name, kind in kinds)


def _models(models: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, model in models.items():
        yield f'<section id="{escape(name)}"><h3>{escape(name)}</h3>'
        yield f"<pre>{escape(model.get('description', ''))}</pre><table>"
        for field, kind in model.get("properties", {}).items():
            yield f"<tr><td><code>{escape(field)}</code></td><td>{_type(kind)}</td></tr>"
        yield "</table></section>"


def _type(kind: Mapping[str, Any]) -> str:
    """A JSON schema in a few words, with links to its models."""
    if "$ref" in kind:
        name = escape(kind["$ref"].removeprefix(_MODELS))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in kind:
        return " or ".join(map(_type, kind["anyOf"]))
    if kind.get("type") == "array":
        return f"list of {_type(kind['items'])}" if "items" in kind else "list"
    if isinstance(of := kind.get("additionalProperties"), Mapping):
        return f"object of {_type(of)}"
    if "enum" in kind:
        return " or ".join(f"<code>{escape(str(each))}</code>" for each in kind["enum"])
    return escape(str(kind.get("type", "anything"))) + _bounds(kind)


def _bounds(kind: Mapping[str, Any]) -> str:
    words = (
        ("minimum", "at least"), ("exclusiveMaximum", "less than"), ("maximum", "at most"),
        ("maxLength", "characters at most:"), ("default", "default"),
    )  # fmt: skip
    told = [f"{text} {kind[name]}" for name, text in words if kind.get(name) is not None]
    return escape(f" ({', '.join(told)})") if told else ""


def add_schema(app: FastAPI, router: APIRouter) -> None:
    """Serve the OpenAPI document of ``router``, and a page of it; neither needs a token.

    FastAPI's own page loads scripts from a CDN, which the machine may not reach.
    """

    @app.get("/v1/openapi.json")
    def schema() -> dict[str, Any]:
        return get_openapi(title="kvgraph", version="1", routes=router.routes)

    @app.get("/v1/docs")
    def docs() -> Response:
        headers = {
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY,
        }
        return HTMLResponse(docs_page(schema()), headers=headers)
