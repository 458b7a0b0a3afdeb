"""The gateway: artd's OpenAI-compatible endpoint, a managed child that runs in the daemon's interpreter.

Data flow of one request: app (HTTP) → flow (render → generate → derender on an engine) → turns → ledger (daemon) →
reply.
"""
