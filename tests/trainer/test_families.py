"""A model family is one file and one line: what the tree of a checkout trains after somebody added both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import toys

ROOT = Path(__file__).parents[2]
FAMILY = '''
from .base import GATED, HfConfig, Layer, Plan, attention, decoder_plan


def plan(config: HfConfig) -> Plan:
    """Norms of queries and keys in every other layer."""
    layers = [Layer(attention(qk_norm=bool(i % 2)), GATED) for i in range(int(config["num_hidden_layers"]))]
    return decoder_plan("striped", config, layers)
'''
LINE = '    "StripedForCausalLM": "striped",\n'
PROGRAM = """
import json, sys
from artd_workers.models.registry import plan_for
from artd_workers.trainer.model.layers import block_spec, kit_of
from artd_workers.trainer.parallel.layout import sparse_of
from artd_workers.trainer.placement import Placement
plan = plan_for(json.loads(sys.argv[1]))
specs = block_spec(plan, kit_of(Placement()), range(plan.layers)).layer_specs
norms = [spec.submodules.self_attention.submodules.q_layernorm.__name__ for spec in specs]
print(json.dumps([plan.family, norms, sparse_of(plan), sum("q_norm" in part for row in plan.codec.rows for part in row.parts)]))
"""


def test_a_file_and_a_line_make_a_family(tmp_path: Path) -> None:
    """Its layers differ from each other, and what builds them asks each."""
    for folder in ("schema/artd_schema", "workers/artd_workers"):
        shutil.copytree(ROOT / folder, tmp_path / Path(folder).name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "artd_workers/models/striped.py").write_text(FAMILY)
    table = tmp_path / "artd_schema/run/families.py"
    head, rest = table.read_text().split('    "LlamaForCausalLM"')
    table.write_text(f'{head}{LINE}    "LlamaForCausalLM"{rest}')
    config = toys.config("llama", num_hidden_layers=4) | {"architectures": ["StripedForCausalLM"]}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(config)], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    family, norms, sparse, normed = json.loads(done.stdout.splitlines()[-1])
    assert (family, sparse, normed) == ("striped", [0, 0, 0, 0], 2)
    assert norms == ["IdentityOp", "RmsNorm", "IdentityOp", "RmsNorm"]
