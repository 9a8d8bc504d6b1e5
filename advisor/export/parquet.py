"""Requests, evictions, blocks and edges as parquet files, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pyarrow.parquet
from pydantic import BaseModel

from ..happened.happened import Happened
from ..happened.origins import Kind, Origin
from .node_link import block_rows, edge_rows


def write_parquet(origin: Origin, directory: Path) -> dict[str, int]:
    """Write a file per table into a new directory; returns the rows of each.

    A snapshot has no requests, and a trace has no graph: those files are not written then.

    Raises:
        OSError: They cannot be written.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    if origin.kind is not Kind.SNAPSHOT:
        tables |= _logs(origin.happened())
    if origin.kind is not Kind.TRACE:
        view = origin.graph()
        places = [str(n) for n in range(len(view.nodes.key) + len(view.names.memories))]
        tables["blocks"] = [{"node": n, **row} for n, row in enumerate(block_rows(view))]
        tables["edges"] = list(edge_rows(view, places))
    directory.mkdir()
    for name, rows in tables.items():
        pyarrow.parquet.write_table(_table(rows), directory / f"{name}.parquet")
    return {name: len(rows) for name, rows in tables.items()}


def _logs(happened: Happened) -> dict[str, list[dict[str, Any]]]:
    logs = {"requests": [_flat(each) for each in happened.requests]}
    if happened.evictions is not None:
        logs["evictions"] = [each.model_dump() for each in happened.evictions]
    return logs


def _flat(model: BaseModel) -> dict[str, Any]:
    """Nested fields by names such as ``miss_reason``: the same ones where there was no miss."""
    flat: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        kinds = field.annotation, *get_args(field.annotation)
        nested = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if nested is None:
            flat[name] = value
        else:
            inside = nested.model_fields
            flat |= {f"{name}_{inner}": getattr(value, inner, None) for inner in inside}
    return flat


def _table(rows: Iterable[Mapping[str, Any]]) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(list(rows))
