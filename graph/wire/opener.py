"""``opener``: urllib for requests that carry a token."""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: the answer then is an ``HTTPError`` with its status."""


def opener(*, through_proxies: bool) -> urllib.request.OpenerDirector:
    """Return an opener that follows no redirects, because urllib's own sends all headers, including
    ``Authorization``, to whatever address an answer names. ``through_proxies``: use the proxies
    that the environment names; not for addresses on this machine.
    """
    proxies = None if through_proxies else dict[str, str]()
    handlers = _NoRedirects(), urllib.request.ProxyHandler(proxies)
    return urllib.request.build_opener(*handlers)  # noqa: TID251
