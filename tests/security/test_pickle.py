"""Nothing received is ever unpickled: no source of ours names what could, but where a file says why. Nor is anything sent to
be unpickled, but by one file."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("artd", "schema", "client", "workers", "examples")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"torch.load", "torch.save", "numpy.load", "np.load", "pickle.loads", "pickle.load"}
SAFE = {("artd/cli/mismatch/probe.py", "np.load")}
"""Calls that are told not to unpickle (`allow_pickle=False`)."""

SENDERS = {"workers/artd_workers/engines/vllm/weights/stock_calls.py"}
"""Files that build pickled bytes for a reader that is not ours: vLLM 0.25 takes its communicator's id in no other form."""
PROTOCOLS = tuple(bytes([0x80, number]) for number in range(2, 6))
"""How pickled bytes begin."""


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses(path: Path) -> set[str]:
    """Modules imported and functions named that can unpickle."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in CALLS or name.split(".")[0] in MODULES}
        elif isinstance(node, ast.Attribute | ast.Name) and dotted(node) in CALLS:
            found.add(dotted(node))
        elif isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj", "recv_serialized"):
            found.add(node.attr)
    return found


def test_nothing_of_ours_can_unpickle():
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for name in uses(path)
    }
    assert found == SAFE
    for file, _ in SAFE:
        assert "allow_pickle=False" in (ROOT / file).read_text()


def builds_pickles(path: Path) -> bool:
    """Whether a constant of it begins as pickled bytes do."""
    found = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return any(isinstance(value, bytes) and value.startswith(PROTOCOLS) for value in found)


def test_only_the_senders_build_what_others_unpickle(tmp_path):
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in paths if builds_pickles(path)} == SENDERS
    planted = tmp_path / "x.py"
    planted.write_text(r'sent = b"\x80\x04K\x01."')
    assert builds_pickles(planted)


def test_the_reader_of_sources_finds_them(tmp_path):
    planted = tmp_path / "x.py"
    for text, name in (
        ("import pickle", "pickle"), ("from torch import load", "torch.load"), ("import torch\ntorch.load(f)", "torch.load"),
        ("import marshal as m", "marshal"), ("socket.recv_pyobj()", "recv_pyobj"),
    ):  # fmt: skip
        planted.write_text(text)
        assert uses(planted) == {name}
