"""vLLM as an engine: `server.py` starts the stock server, `adapter.py` speaks to it, `extension.py` runs in its worker."""
