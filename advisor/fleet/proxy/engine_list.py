"""The engines that the proxy is told of: by the command line, or by a file that may change."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from ....graph.errors import ConfigError

FIRST_BYTE_S: Final = 600.0
"""For which an engine may be silent before the first byte of an answer; chosen: twice as long as
admission holds a request, and as long as OpenAI's clients wait."""
MOST_ENGINES: Final = 1024
"""Chosen: decisions are measured with 1,000."""

MOST_SHOWN: Final = 80
"""Characters of a bad address that an error shows; chosen."""


class Listed(NamedTuple):
    """An engine's address, and whether it shall get no further requests."""

    url: str
    drains: bool = False


def engine_in(words: str) -> Listed:
    """An engine as a line says it: ``URL``, or ``URL drain``.

    Raises:
        ConfigError: It says something else.
    """
    url, *rest = words.split() or [""]
    if not is_address(url) or rest not in ([], ["drain"]):
        raise ConfigError(
            f"engine {words[:MOST_SHOWN]!r}: allowed: http://HOST:PORT, and behind it the word "
            "drain"
        )
    return Listed(url.rstrip("/").removesuffix("/v1"), bool(rest))


def is_address(url: str) -> bool:
    """Whether this is ``http(s)://HOST[:PORT][/PATH]``, without user, password, query, fragment."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # a name that cannot be looked up raises
        more = parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return plain and parts.scheme in ("http", "https") and bool(host) and not more


def engines_in(path: Path) -> list[Listed]:
    """The engines that a file lists, one per line; empty lines and those that begin with # are
    skipped.

    Raises:
        ConfigError: It cannot be read, or a line is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engines {str(path)!r}: {error}") from None
    found = [
        engine_in(line) for line in lines if line.strip() and not line.lstrip().startswith("#")
    ]
    return checked(found)


def checked(engines: list[Listed]) -> list[Listed]:
    """The same engines.

    Raises:
        ConfigError: There is none, there are too many, or one is listed twice.
    """
    urls = [each.url for each in engines]
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise ConfigError(f"engines that are listed twice: {', '.join(sorted(twice))}")
    if not urls or len(urls) > MOST_ENGINES:
        raise ConfigError(f"{len(urls)} engines: allowed: 1 to {MOST_ENGINES}")
    return engines
