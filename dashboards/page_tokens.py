"""Derives tokens from a sidecar's secret, and the page's address; see ``page_access``."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

EDIT_HEADER: Final = "X-Kvgraph-Edit"
"""In which the edit token is sent."""


def page_token(secret: str) -> str:
    """The token that opens the page, and every question."""
    return derived(secret, "page")


def edit_token(secret: str) -> str:
    """The token that lets readers of the page change the weights."""
    return derived(secret, "edit")


def page_address(url: str, secret: str, *, edit: bool = False) -> str:
    """The address of the page of the sidecar at ``url`` for a browser; with ``edit`` to change
    things."""
    address = f"{url}/open?token={page_token(secret)}"
    return f"{address}#edit={edit_token(secret)}" if edit else address


def derived(secret: str, use: str) -> str:
    """48 hexadecimal digits for one use, which reveal neither the secret nor those of other
    uses."""
    return hmac.new(secret.encode(), f"kvgraph {use}".encode(), hashlib.sha256).hexdigest()[:48]
