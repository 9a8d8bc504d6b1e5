"""How this engine hashes blocks, so that others can be held against it."""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from typing import Final

_PATIENCE_S: Final = 0.5  # chosen: vLLM sets the seed some milliseconds after it made us
_LOOK_S: Final = 0.01  # chosen
_ROUNDS: Final = 100_000  # of PBKDF2, some 40 ms: who tries every PYTHONHASHSEED needs years
_DIGEST_BYTES: Final = 4


def block_hashing(algorithm: str, patience_s: float = _PATIENCE_S) -> str:
    """The algorithm, and a digest of the hash that a fixed block gets: ``sha256 5be0cd19``.

    That hash covers what vLLM begins with before a prompt's first block (``NONE_HASH``, from
    ``PYTHONHASHSEED`` or, without it, for some algorithms at random), and how blocks are
    serialized. The digest is slow to make, and too short to name the seed.

    Args:
        algorithm: ``prefix_caching_hash_algo``.
        patience_s: How long vLLM may take to set the seed; this thread waits.

    Returns:
        Empty where there is no seed by then, or the algorithm is not known here.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    until = time.monotonic() + patience_s
    while True:
        try:
            probe = hash_block_tokens(get_hash_fn_by_name(algorithm), None, (0,))
        except NameError:  # the seed's: vLLM has not set it yet
            if time.monotonic() >= until:
                return ""
            time.sleep(_LOOK_S)
        except Exception:
            return ""
        else:
            return f"{algorithm} {_digest(probe)}"


@lru_cache(maxsize=8)
def _digest(probe: bytes) -> str:
    digest = hashlib.pbkdf2_hmac("sha256", probe, b"kvgraph block hashing", _ROUNDS, _DIGEST_BYTES)
    return digest.hex()
