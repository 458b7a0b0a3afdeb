"""What a packed batch must mean, written from the definition and not from the packer: used by the packing tests."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from artd.packing.manifest import Source
from artd_schema.codec import digest
from artd_schema.manifest import BatchManifest
from artd_schema.trajectory import Sampling, Turn


def turn(prompt, sampled, *, temperature=1.0, epochs=(), seed=0) -> Turn:
    rng = np.random.default_rng([seed, len(prompt), len(sampled)])
    return Turn(
        prompt_ids=np.asarray(prompt, "<i4").tobytes(),
        token_ids=np.asarray(sampled, "<i4").tobytes(),
        logprobs=(-rng.random(len(sampled))).astype("<f4").tobytes(),
        sampling=Sampling(temperature=temperature),
        policy_epoch=tuple(epochs),
    )


def source(number: int, group: int, reward: float, turns: list[Turn]) -> Source:
    body = msgspec.msgpack.encode(turns)
    return Source(number, group, reward, digest(body), body)


def plain_sequences(turns: list[Turn]) -> list[list[tuple]]:
    """Token by token: (token, sampled, logprob bits, temperature, epoch). Slow and literal."""
    sequences: list[list[tuple]] = []
    for item in turns:
        prompt = np.frombuffer(item.prompt_ids, "<i4").tolist()
        tokens = np.frombuffer(item.token_ids, "<i4").tolist()
        bits = np.frombuffer(item.logprobs, "<u4").tolist()
        if not sequences or [entry[0] for entry in sequences[-1]] != prompt[: len(sequences[-1])]:
            sequences.append([])
        current = sequences[-1]
        current.extend((token, 0, None, 1.0, -1) for token in prompt[len(current) :])
        for position, (token, bit) in enumerate(zip(tokens, bits, strict=True)):
            epoch = -1
            for start, value in item.policy_epoch:
                if start <= position:
                    epoch = value
            current.append((token, 1, bit, float(np.float32(item.sampling.temperature)), epoch))
    return sequences


def visible(segments: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """[S, S] bool: query q sees key k iff k's segment is an ancestor-or-self of q's and k comes no later."""
    size = int((segments >= 0).sum())
    assert (segments[size:] == -1).all() and (parents[size:] == -1).all(), "padding is not one tail"
    parent_of: dict[int, int] = {}
    for position in range(size):
        segment, parent = int(segments[position]), int(parents[position])
        if position and segment == segments[position - 1]:
            assert parent == parent_of[segment], "one segment, two parents"
            continue
        assert segment not in parent_of, "a segment is not contiguous"
        assert parent == segment or parent in parent_of, "the parent comes after the child"
        parent_of[segment] = parent
    ancestors: dict[int, set[int]] = {}
    for segment, parent in parent_of.items():
        ancestors[segment] = {segment} | (ancestors[parent] if parent != segment else set())
    mask = np.zeros((size, size), bool)
    for query in range(size):
        for key in range(query + 1):
            mask[query, key] = int(segments[key]) in ancestors[int(segments[query])]
    return mask


def check_batch(
    tensors: dict[str, np.ndarray], manifest: BatchManifest, expected: dict[int, list[list[tuple]]]
) -> None:
    """Unpack the rows and compare with `expected`: trajectory id -> its sequences. AssertionError says what differs."""
    found: dict[int, list[list[tuple]]] = {number: [] for number in expected}
    for row in range(manifest.rows):
        columns = {name: array[row] for name, array in tensors.items()}
        mask = visible(columns["segment_ids"], columns["parent_ids"])
        size = len(mask)
        owner = columns["trajectory_index"]
        assert not columns["loss_mask"][size:].any() and not columns["loss_mask"][owner < 0].any()
        assert np.isnan(columns["old_logprobs"][columns["loss_mask"] == 0]).all()
        assert (columns["weights"] == columns["loss_mask"]).all()
        assert (columns["temperatures"][columns["loss_mask"] == 0] == 1).all()
        for query in range(size):
            keys = np.flatnonzero(mask[query])
            positions = columns["position_ids"][keys]
            # The brute-force causal mask: exactly the tokens 0..p of the query's own sequence.
            assert positions.tolist() == list(range(int(columns["position_ids"][query]) + 1)), "not a causal prefix"
            if columns["loss_mask"][query]:
                # The logits one place before must be those that predict this token.
                assert keys[-2] == query - 1, "the token before a trained one lies elsewhere"
                assert columns["segment_ids"][query - 1] == columns["segment_ids"][query], "shared token predicts"
        for segment in sorted(set(columns["segment_ids"][:size].tolist())):
            last = int(np.flatnonzero(columns["segment_ids"][:size] == segment)[-1])
            if owner[last] < 0:
                continue
            entry = manifest.trajectories[int(owner[last])]
            assert row in entry.rows
            keys = np.flatnonzero(mask[last])
            trained = columns["loss_mask"][keys] == 1
            assert (columns["advantages"][keys][trained] == np.float32(entry.advantage)).all()
            assert not columns["advantages"][keys][~trained].any()
            bits = columns["old_logprobs"].view(np.uint32)
            found[entry.id].append(
                [
                    (
                        int(columns["tokens"][k]),
                        int(columns["loss_mask"][k]),
                        int(bits[k]) if columns["loss_mask"][k] else None,
                        float(columns["temperatures"][k]),
                        int(columns["policy_epochs"][k]),
                    )
                    for k in keys
                ]
            )
    for number, sequences in expected.items():
        assert Counter(map(tuple, found[number])) == Counter(map(tuple, sequences)), f"trajectory {number} differs"
