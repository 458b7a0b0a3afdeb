"""Reads what vLLM reports of its work: from its metrics, and from artd's count of the requests in its API server.

The metrics come with the engine's answers, so an engine that never answers has no request by them; the count (`guard`) still
sees it.
"""

from __future__ import annotations

import re
from pathlib import Path

from artd_workers.deadline import Deadline
from artd_workers.engines.http import StatusError, call
from artd_workers.engines.process.progress import ANSWER_S, Work

from . import guard

_MARKS = re.compile(
    r"^vllm:(?:generation_tokens_total|prompt_tokens_total|kv_cache_usage_perc|prefix_cache_queries_total|num_preemptions_total"
    r"|request_success_total)\{.*$",
    re.MULTILINE,
)
"""Metrics that change with progress. The cache's usage rises while a long prompt is computed in parts, before its first token."""
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\}\s+(\S+)$", re.MULTILINE)
_AWAKE = re.compile(r'^vllm:engine_sleep_state\{.*sleep_state="awake".*\}\s+(\S+)$', re.MULTILINE)


def ask(socket: Path) -> Work:
    """Ask the server. Raises EngineError."""
    deadline = Deadline(ANSWER_S)
    page = str(call(str(socket), "GET", "/metrics", deadline=deadline))
    return read(page, _in_flight(str(socket), deadline))


def read(page: str, in_flight: int) -> Work:
    """Read a /metrics page. `in_flight`: generating requests in the API server."""
    counted = sum(int(float(value)) for value in _REQUESTS.findall(page))
    awake = _AWAKE.findall(page)
    return Work(max(counted, in_flight), "\n".join(_MARKS.findall(page)), bool(awake) and not any(map(float, awake)))


def _in_flight(socket: str, deadline: Deadline) -> int:
    try:
        told = call(socket, "GET", guard.IN_FLIGHT, deadline=deadline)
    except StatusError:  # a server without artd's middleware
        return 0
    return int(told["requests"]) if isinstance(told, dict) else 0
