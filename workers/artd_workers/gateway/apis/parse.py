"""Requests of any API, read with care for what clients send in the wrong form."""

from __future__ import annotations

from artd_workers.gateway.errors import invalid

from .base import Api, Ask, Json


def parse(api: Api, body: Json) -> Ask:
    """Return the request in the core's form. Raises ApiError 400, also for a body whose parts are of other types than the API has."""
    try:
        return api.parse(body)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else str(error)
        raise invalid(f"the body has not the form of {api.path}: {what}", code="invalid_body") from error
