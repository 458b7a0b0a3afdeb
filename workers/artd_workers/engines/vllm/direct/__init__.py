"""The direct push into vLLM: what its kernels read (`survey.py`), and its calls in vLLM's worker (`extension.py`).

Seen running with vLLM 0.25.1 on CUDA.
"""
