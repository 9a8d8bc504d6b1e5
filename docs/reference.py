"""A hook of mkdocs: writes the reference from the code, and takes in pages that lie outside docs/.

A page of ``docs/reference/`` has a line ``<!-- reference: NAME -->``; what ``NAME`` is in
``SECTIONS`` takes its place. Links that leave ``docs/`` lead to copies below ``files/``, so that a
site needs no other host.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import MagicMock, patch

import annotated_types
import kvgraph
import typer
from kvgraph.advisor import service as sidecar
from kvgraph.advisor.cli import build_app
from kvgraph.advisor.config.config import ENV_PREFIX, Config, load
from kvgraph.dashboards.app import create_app
from kvgraph.dashboards.metrics import SidecarCollector
from pydantic import BaseModel
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from fastapi import FastAPI
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = Path(__file__).parent
ENGINE_PREFIX: Final = "AITHER_KVCACHE_"
# Dataclasses that say what the keys of a section mean, where the section itself does not.
EXPLAINED_BY: Final = {"score": (kvgraph.Weights, kvgraph.Rules), "graph": (kvgraph.GraphLimits,)}
# What requests answer that have no model.
PLAIN: Final = {
    "/": "the page for a browser, else a list of what is here",
    "/assets/{name}": "the page's scripts and styles",
    "/healthz": "200 while rankings are made in time, else 503; also `/health`, `/live`, `/livez`, "
    "`/ping`",
    "/readyz": "200 once all linked engines get advice, else 503; also `/ready`",
    "/status": "engines, sessions and counters, as `kvgraph status --json` prints them",
    "/metrics": "[metrics](metrics.md) for Prometheus",
    "/blocks/{key}/explain": "why a block ranks where it does, as `kvgraph explain` says it",
    "/waiting": "requests that engines hold until there is room",
    "/sessions/{name}/explain": "what a session does and holds",
    "/memories/{name}/explain": "who recalls a memory, and which blocks hold it",
    "/v1/events": "server-sent events: what changed, once a second",
    "/v1/openapi.json": "the schema of all paths below `/v1`",
    "/open": "the page, after a cookie with the token is set; `kvgraph open` gives the address",
}
# Pages of the repository's root, by their names on the site.
FROM_ROOT: Final = {
    f"{name}.md": f"{name.lower()}.md"
    for name in ("ARCHITECTURE", "SECURITY", "CONTRIBUTING", "CHANGELOG")
    if (ROOT / f"{name}.md").exists()
}

_MARKER: Final = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_ROW: Final = re.compile(rf"^\| `{ENGINE_PREFIX}.+\|$", re.MULTILINE)


def configuration() -> str:
    return "\n\n".join(_section(name, model) for name, model in _sections(Config, ""))


def metrics() -> str:
    source = MagicMock()  # every family is there, and none has a sample
    source.status().counters = {group: {} for group in _sidecar().counters}
    rows = [
        f"| `{_exposed(family)}` | {family.type} | {_labels(family)} | {family.documentation} |"
        for family in SidecarCollector(source).collect()
    ]
    return _table("metric", "type", "labels", "what", rows=rows)


def http() -> str:
    schema = _sidecar().app.openapi()
    rows = [
        _operation(method, path, operation, schema["components"]["schemas"])
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    table = _table("request", "token", "parameters", "answers with", rows=rows)
    models = schema["components"]["schemas"].items()
    return "\n\n".join([table, "## Models", *(_model(*each) for each in models if each[1])])


def python() -> str:
    """Every public name; mkdocstrings writes what each is."""
    return "\n\n".join(
        f"::: {value.__module__}.{name}" for name, value in sorted(_public(), key=lambda at: at[0])
    )


def variables() -> str:
    """The rows of all pages that say what a variable of the engine means, each with its page."""
    found: list[str] = []
    for page in sorted(DOCS.glob("*.md")):
        for row in _ROW.findall(page.read_text()):
            cells = row.strip("| ").split(" | ", 1)
            told = re.sub(r"\]\(#", f"]({page.name}#", cells[1])  # an anchor of its own page
            told = _moved(told, page.parent, DOCS / "reference")
            found.append(f"| {cells[0]} | {told} | [{page.stem}](../{page.name}) |")
    return _table("variable", "meaning", "more", rows=found)


def commands() -> str:
    """Every command with its options, in the order of ``kvgraph --help``."""
    known = typer.main.get_command(build_app(None))
    names = [*getattr(known, "commands", {})]
    return "\n\n".join(_command(name) for name in names)


SECTIONS: Final[dict[str, Callable[[], str]]] = {
    each.__name__: each for each in (configuration, metrics, http, python, variables, commands)
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add what the repository has of pages about itself to the navigation."""
    pages = {
        "Contributing": "contributing.md",
        "Changes": "changelog.md",
        "Stability": "stability.md",
    }
    known = {*FROM_ROOT.values(), *(page.name for page in DOCS.glob("*.md"))}
    listed = [{title: name} for title, name in pages.items() if name in known]
    if listed:
        config.nav = [*(config.nav or []), {"Project": listed}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and every file outside ``docs/`` that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    for source, name in FROM_ROOT.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for file in sorted(_linked_outside()):
        name = _copied(file.relative_to(ROOT).as_posix())
        files.append(
            File.generated(
                config, name, abs_src_path=str(file), inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the reference's sections, and turn links that leave ``docs/``."""
    name = page.file.src_uri
    markdown = _MARKER.sub(lambda found: SECTIONS[found[1]](), markdown)
    if name in FROM_ROOT.values():
        return _moved(markdown, ROOT, DOCS)
    return _moved(markdown, (DOCS / name).parent, (DOCS / name).parent)


class _Sidecar(NamedTuple):
    app: FastAPI
    counters: tuple[str, ...]


@cache
def _sidecar() -> _Sidecar:
    """What a sidecar with no configuration serves; it is stopped before it begins."""
    made: list[FastAPI] = []

    def noted(*args: Any, **named: Any) -> FastAPI:
        made.append(create_app(*args, **named))
        return made[-1]

    with TemporaryDirectory() as folder, patch.object(sidecar, "create_app", noted):
        overrides = {"sidecar.endpoint": f"ipc://{folder}/sidecar.sock"}
        service = sidecar.Service(load(None, overrides))
        counters = tuple(service.status.status().counters)
        service.stop()
        service.run()
    return _Sidecar(made[0], counters)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield f"{prefix}{name}", section
            yield from _sections(section, f"{prefix}{name}.")


def _section(name: str, model: type[BaseModel]) -> str:
    summary, told = _told(model)
    for other in EXPLAINED_BY.get(name, ()):
        told = _told(other)[1] | told
    own = {
        key: field
        for key, field in model.model_fields.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    }
    if unsaid := own.keys() - told.keys():
        raise LookupError(f"[{name}]: the docstring does not say what {sorted(unsaid)} mean")
    rows = [
        f"| `{key}` | {_shown(field)} | {_allowed(field)} | {told[key]} |"
        for key, field in own.items()
    ]
    variable = f"`{ENV_PREFIX}{name.upper().replace('.', '__')}__KEY`"
    table = _table("key", "default", "allowed", "meaning", rows=rows)
    return f"## `[{name}]`\n\n{summary} In the environment: {variable}.\n\n{table}"


def _told(model: type) -> tuple[str, dict[str, str]]:
    """A model's docstring: its summary, and what it says of attributes."""
    return _parts(inspect.getdoc(model) or "")


def _parts(docstring: str) -> tuple[str, dict[str, str]]:
    summary, _, attributes = docstring.partition("\nAttributes:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return _line(summary), {name: _line(text) for name, text in found}


def _shown(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        return _code(value) or "empty"
    return (
        f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"
    )


def _allowed(field: FieldInfo) -> str:
    limits = [*field.metadata, *_inner_limits(field.annotation)]
    words = {
        "ge": "at least {}",
        "gt": "above {}",
        "le": "at most {}",
        "lt": "below {}",
        "max_length": "at most {} long",
        "min_length": "at least {} long",
    }
    said = [
        word.format(_number(getattr(limit, name)))
        for limit in limits
        if isinstance(limit, annotated_types.BaseMetadata)
        for name, word in words.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_kind(field.annotation), *said])


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _inner_limits(annotation: Any) -> list[Any]:
    return [
        limit
        for part in typing.get_args(annotation)
        if typing.get_origin(part) is typing.Annotated
        for outer in typing.get_args(part)[1:]
        for limit in getattr(outer, "metadata", [outer])
    ]


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (tuple, frozenset):
        return "list"
    kinds = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
    return str(kinds.get(annotation, getattr(annotation, "__name__", annotation)))


def _labels(family: Any) -> str:
    return _code(family._labelnames)  # prometheus_client keeps them to itself


def _exposed(family: Any) -> str:
    return str(family.name) + {"counter": "_total", "info": "_info"}.get(family.type, "")


def _operation(method: str, path: str, operation: dict[str, Any], models: dict[str, Any]) -> str:
    names = {each["name"].lower() for each in operation.get("parameters", [])}
    token = "edit" if "x-kvgraph-edit" in names else "read" if "authorization" in names else "–"
    asked = [
        each["name"]
        for each in operation.get("parameters", [])
        if each["in"] == "query" or each["name"] == "if-none-match"
    ]
    body = _reference(operation.get("requestBody", {}))
    given = [*map("`{}`".format, asked), *([f"body: {_linked(body, models)}"] if body else [])]
    answer = _reference(operation["responses"].get("200", {}))
    said = _linked(answer, models) if answer else PLAIN[path]
    return f"| `{method.upper()} {path}` | {token} | {', '.join(given)} | {said} |"


def _reference(message: dict[str, Any]) -> str:
    schema = message.get("content", {}).get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _linked(name: str, models: dict[str, Any]) -> str:
    return f"[`{name}`](#{name.lower()})" if name in models else ""


def _model(name: str, schema: dict[str, Any]) -> str:
    summary, found = _parts(str(schema.get("description", "")))
    rows = [
        f"| `{field}` | {_json_type(of)} | {found.get(field, '')} |"
        for field, of in schema.get("properties", {}).items()
    ]
    table = _table("field", "type", "meaning", rows=rows) if rows else ""
    return f"### {name}\n\n{summary}\n\n{table}"


def _json_type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_json_type(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_json_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _public() -> Iterator[tuple[str, Any]]:
    for name in kvgraph.__all__:
        value = getattr(kvgraph, name)
        if not inspect.getdoc(value):
            raise LookupError(f"kvgraph.{name} is public and has no docstring")
        yield name, value


def _command(name: str) -> str:
    parent = typer.main.get_command(build_app(name))
    found = getattr(parent, "commands", {})[name]
    parts = [f"## kvgraph {name}", _help(found), _options(found)]
    for sub, each in getattr(found, "commands", {}).items():
        parts += [f"### kvgraph {name} {sub}", _help(each), _options(each)]
    return "\n\n".join(part for part in parts if part)


def _help(command: Any) -> str:
    return str(command.help or "").replace("\x08", "").strip()


def _options(command: Any) -> str:
    rows = []
    for each in command.params:
        names = each.opts if each.param_type_name == "option" else [each.name.upper()]
        if names == ["--help"]:
            continue
        default = (
            "" if each.default in (None, False, ()) or callable(each.default) else each.default
        )
        shown = f"`{default}`" if default != "" else ""
        rows.append(f"| {_code(names)} | {shown} | {_line(getattr(each, 'help', None) or '')} |")
    return _table("option", "default", "meaning", rows=rows) if rows else ""


def _linked_outside() -> set[Path]:
    """Files outside ``docs/`` to which its pages, and the root's, link."""
    pages = [*((page, page.parent) for page in DOCS.rglob("*.md"))]
    pages += [(ROOT / name, ROOT) for name in FROM_ROOT]
    found = {
        (home / link).resolve()
        for page, home in pages
        for link, _ in _LINK.findall(page.read_text())
        if "://" not in link
    }
    return {
        file
        for file in found
        if file.is_file() and not file.is_relative_to(DOCS) and file.name not in FROM_ROOT
    }


def _copied(path: str) -> str:
    """Where a copy of a file of the repository lies; sources are shown and not run or rendered."""
    return f"files/{path}.txt" if path.endswith((".md", ".py", ".html")) else f"files/{path}"


def _moved(markdown: str, home: Path, page: Path) -> str:
    """Links of a text that lies in ``home``, as a page in ``page`` has to say them."""

    def turned(found: re.Match[str]) -> str:
        link, anchor = found[1], found[2] or ""
        target = (home / link).resolve()
        if "://" in link or not target.exists():
            return found[0]
        if target.parent == ROOT and target.name in FROM_ROOT:
            target = DOCS / FROM_ROOT[target.name]
        elif not target.is_relative_to(DOCS):
            target = DOCS / _copied(target.relative_to(ROOT).as_posix())
        return posixpath.relpath(target.as_posix(), page.as_posix()) + anchor

    return _LINK.sub(turned, markdown)


def _table(*heads: str, rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows])


def _code(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", r"\|").split())
