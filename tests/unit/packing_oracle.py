"""The meaning of a packed batch, written from the definition and not from the packer; the packing tests use it."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from artd.packing.batch import Bundle, Source
from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import BatchManifest
from artd_schema.data.trajectory import RouteShape, Sampling, Turn


def turn(prompt, sampled, *, temperature=1.0, epochs=(), seed=0, **more) -> Turn:
    rng = np.random.default_rng([seed, len(prompt), len(sampled)])
    return Turn(
        prompt_ids=np.asarray(prompt, "<i4").tobytes(),
        token_ids=np.asarray(sampled, "<i4").tobytes(),
        logprobs=(-rng.random(len(sampled))).astype("<f4").tobytes(),
        sampling=Sampling(temperature=temperature),
        policy_epoch=tuple(epochs),
        **more,
    )


def encode_routes(rows: list[list[list[int]]], shape: RouteShape) -> bytes:
    """rows[token][layer]: topk ids."""
    assert all(len(row) == shape.layers and all(len(ids) == shape.topk for ids in row) for row in rows)
    flat = [number for row in rows for ids in row for number in ids]
    return b"".join(number.to_bytes(shape.width, "little") for number in flat)


def decode_routes(data: bytes, shape: RouteShape) -> list[tuple[tuple[int, ...], ...]]:
    """Of each row, of each layer, the ids, which mean the same in any order."""
    numbers = [int.from_bytes(data[i : i + shape.width], "little") for i in range(0, len(data), shape.width)]
    layers = [tuple(sorted(numbers[i : i + shape.topk])) for i in range(0, len(numbers), shape.topk)]
    return [tuple(layers[i : i + shape.layers]) for i in range(0, len(layers), shape.layers)]


def source(number: int, group: int, reward: float, turns: list[Turn]) -> Source:
    body = msgspec.msgpack.encode(turns)
    return Source(number, group, reward, digest(body), body)


def plain_sequences(turns: list[Turn], shape: RouteShape | None = None) -> list[list[tuple]]:
    """Token by token: (token, sampled, logprob bits, temperature, epoch, routes or None). Slow and literal."""
    sequences: list[list[tuple]] = []
    captured: list[dict[int, tuple]] = []  # of each sequence: position -> routes
    for item in turns:
        prompt = np.frombuffer(item.prompt_ids, "<i4").tolist()
        tokens = np.frombuffer(item.token_ids, "<i4").tolist()
        bits = np.frombuffer(item.logprobs, "<u4").tolist()
        if not sequences or [entry[0] for entry in sequences[-1]] != prompt[: len(sequences[-1])]:
            sequences.append([])
            captured.append({})
        current = sequences[-1]
        current.extend((token, 0, None, 1.0, -1) for token in prompt[len(current) :])
        for position, (token, bit) in enumerate(zip(tokens, bits, strict=True)):
            epoch = -1
            for start, value in item.policy_epoch:
                if start <= position:
                    epoch = value
            current.append((token, 1, bit, float(np.float32(item.sampling.temperature)), epoch))
        for row, routes in enumerate(decode_routes(item.routes, shape) if shape else ()):
            captured[-1].setdefault(item.routes_start + row, routes)
    return [
        [(*entry, known.get(position)) for position, entry in enumerate(entries)]
        for entries, known in zip(sequences, captured, strict=True)
    ]


def shared_tokens(sequences: list[list[tuple]], shared: bool = True, start: int = 0, min_shared: int = 64) -> int:
    """Tokens that the sequences of one group save in one row, by the rule as it is written: descend from the root, and
    share what all have in common of what each may share, if it is long enough or one's whole prompt. shared: whether
    equal routes are asked for too."""

    def item(sequence: list[tuple], position: int) -> tuple:
        return (sequence[position][0], sequence[position][5] if shared else None)

    def limit(sequence: list[tuple]) -> int:
        return max(next(i for i, entry in enumerate(sequence) if entry[1]) - 1, 0)

    def descend(members: list[list[tuple]], start: int) -> int:
        if len(members) < 2:
            return 0
        end = min(limit(member) for member in members)
        common = 0
        while common < end and len({item(member, common) for member in members}) == 1:
            common += 1
        saved = 0
        whole = common > start and any(limit(member) == common for member in members)
        if whole or common - start >= min_shared:
            saved, start = (common - start) * (len(members) - 1), common
        branches: dict[object, list[list[tuple]]] = {}
        for number, member in enumerate(members):
            ended = limit(member) == common
            branches.setdefault(("ends", number) if ended else item(member, common), []).append(member)
        return saved + sum(descend(branch, start) for branch in branches.values())

    return descend(sequences, start)


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
    seen = {segment: np.isin(segments[:size], list(above)) for segment, above in ancestors.items()}
    return np.tril([seen[int(segment)] for segment in segments[:size]])


def check_batch(
    tensors: dict[str, np.ndarray],
    manifest: BatchManifest,
    expected: dict[int, list[list[tuple]]],
    replay: Bundle | None = None,
) -> None:
    """Unpack the rows and compare with `expected`: trajectory id -> its sequences. AssertionError says what differs."""
    assert manifest.replay == (digest(to_json(replay.manifest)) if replay else "")
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
                        routes_at(replay, row, int(k)) if replay else None,
                    )
                    for k in keys
                ]
            )
    for number, sequences in expected.items():
        assert Counter(map(tuple, found[number])) == Counter(map(tuple, sequences)), f"trajectory {number} differs"
    if replay:
        check_bundle(tensors, manifest, replay)


def routes_at(replay: Bundle, row: int, position: int) -> tuple[tuple[int, ...], ...] | None:
    """Of each layer the ids of one packed token; None where it is not covered."""
    ids = replay.tensors["routes"][:, row, position]
    return tuple(map(tuple, ids.tolist())) if replay.tensors["covered"][row, position] else None


def check_bundle(tensors: dict[str, np.ndarray], manifest: BatchManifest, replay: Bundle) -> None:
    """What must hold of a bundle whatever the trajectories were."""
    routes, covered, told = replay.tensors["routes"], replay.tensors["covered"], replay.manifest
    shape = told.shape
    rows, length = tensors["tokens"].shape
    assert routes.shape == (shape.layers, rows, length, shape.topk) and covered.shape == (rows, length)
    assert (routes.dtype, covered.dtype) == (np.uint8 if shape.experts <= 256 else np.uint16, np.uint8)
    assert (told.run, told.step, told.token_digest) == (manifest.run, manifest.step, manifest.token_digest)
    assert (told.rows, told.row_length, told.tokens) == (rows, length, manifest.physical_tokens)
    assert told.covered == int(covered.sum()) and set(np.unique(covered)) <= {0, 1}
    assert {name: info.sha256 for name, info in told.tensors.items()} == {
        name: digest(array.tobytes()) for name, array in replay.tensors.items()
    }
    assert {info.dtype for info in told.tensors.values()} == {"U8", "U16" if shape.experts > 256 else "U8"}
    assert (routes[:, covered == 0] == np.arange(shape.topk)).all(), (
        "what nobody captured holds other ids than 0 .. topk-1"
    )
    segments = tensors["segment_ids"]
    last = np.ones_like(segments, bool)
    last[:, :-1] = segments[:, :-1] != segments[:, 1:]
    assert not (covered[segments < 0]).any(), "padding has routes"
    assert (last & (tensors["trajectory_index"] >= 0))[(covered == 0) & (segments >= 0)].all(), "a hole"
