"""vLLM's own side of a push over its transfer calls, as far as it works without a GPU; vLLM's interpreter runs it.

The id goes through a real `StatelessProcessGroup`, tensors through vLLM's packer.
"""

from __future__ import annotations

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

from artd_schema.data.manifest import WeightEntry
from artd_workers.engines.vllm.weights import stock_calls
from artd_workers.transfer.nccl import stock as wire

ID = bytes(range(1, 129))
SIZES = (600, 8, 3072, 4, 600, 25, 25, 2500, 5)
LIMIT = 10_000


def main() -> None:
    with stock_calls.meet(ID, 20.0) as meeting:
        group = StatelessProcessGroup.create(meeting["master_address"], meeting["master_port"], wire.ENGINE, wire.WORLD)
        assert bytes(group.broadcast_obj(None, src=wire.TRAINER)) == ID
    tensors = [(str(number), torch.full((size,), float(number))) for number, size in enumerate(SIZES)]
    table = [WeightEntry(name, "float32", tuple(tensor.shape)) for name, tensor in tensors]
    source, packed = iter(tensors), []
    while chunk := pack_tensors(source, lambda item: item[1], LIMIT):
        packed.append(chunk.names)
    assert packed == [[entry.name for entry in chunk] for chunk in wire.chunks(table, LIMIT)] and len(packed) > 2
    print("agreed", len(packed))


main()
