"""Checks the bearer token of every request. The token comes from `GatewayConfig`.

The comparison takes the same time wherever the first wrong byte is.
"""

from __future__ import annotations

import hmac

from artd_workers.gateway.errors import ApiError


def check_bearer(header: bytes, token: str) -> None:
    """Check a raw Authorization header. Raises ApiError 401 when it is missing, of another scheme, or wrong."""
    if not header:
        raise ApiError(401, "missing_api_key", "no API key: send `Authorization: Bearer KEY` (run.api_key has the key)")
    scheme, _, given = header.partition(b" ")
    if scheme.lower() != b"bearer":
        raise ApiError(
            401, "invalid_api_key", f"authorization scheme {scheme.decode('latin-1')!r} is not supported: use Bearer"
        )
    if not token or not hmac.compare_digest(given.strip(), token.encode()):
        raise ApiError(401, "invalid_api_key", "wrong API key: run.api_key of the artd client has the right one")
