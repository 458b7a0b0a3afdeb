"""vLLM as an engine: `server.py` starts the stock server, `adapter.py` calls it, `extension.py` runs in its worker."""
