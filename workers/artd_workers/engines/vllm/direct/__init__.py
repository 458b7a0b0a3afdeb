"""The direct push into vLLM: what its kernels read (`survey.py`), and its worker's extension (`extension.py`).

Seen running with vLLM 0.25.1 on CUDA. Not wired into the harness's push yet: see docs/weights.md.
"""
