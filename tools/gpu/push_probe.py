"""The worker extension of `tools.gpu.push`'s server: artd's own, with the script's calls. Imported in vLLM's worker alone."""

from __future__ import annotations

from artd_workers.engines.vllm.extension import Extension

from .push_engine import ProbeCalls


class Probe(ProbeCalls, Extension):
    """`self` is vLLM's worker."""
