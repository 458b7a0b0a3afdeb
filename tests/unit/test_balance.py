"""The choice among engines: turns stay where their prefix is, and no engine gets much more than the others."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artd_workers.gateway.balance.balance import SLACK, Balance, Work
from artd_workers.gateway.balance.prefixes import BLOCK, Holders, Prefix

E0, E1, E2 = ("/e0", 4), ("/e1", 4), ("/e2", 4)
CACHES = (E0, E1, E2)
tokens = st.lists(st.integers(0, 9), max_size=4 * BLOCK)


def work(*parts: range) -> Work:
    prompt = [token for part in parts for token in part]
    return Work(Prefix().extend(prompt), len(prompt))


@given(first=tokens, second=tokens)
def test_a_prefix_is_the_same_however_it_came_together(first, second):
    assert Prefix().extend(first).extend(second) == Prefix().extend([*first, *second])
    assert Prefix().extend(first).tokens == len(first)


@given(held=tokens, asked=tokens)
def test_a_cache_holds_the_whole_blocks_that_two_sequences_share(held, asked):
    holders = Holders()
    holders.add(Prefix().extend(held), E0)
    same = next((i for i, (a, b) in enumerate(zip(held, asked, strict=False)) if a != b), min(len(held), len(asked)))
    shared = same - same % BLOCK
    assert holders.find(Prefix().extend(asked), {E0, E1}) == ({E0: shared} if shared else {})


def test_the_oldest_blocks_are_forgotten():
    holders = Holders(limit=3)
    old, new = (Prefix().extend(range(at, at + 2 * BLOCK)) for at in (0, 1000))
    holders.add(old, E0)
    holders.add(new, E0)
    assert holders.find(new, {E0}) == {E0: 2 * BLOCK}
    assert holders.find(old, {E0}) == {E0: 2 * BLOCK}, "its first block went, and its second stands for both"
    holders.add(new.extend(range(2 * BLOCK)), E0)
    assert holders.find(old, {E0}) == {}


@settings(max_examples=50)
@given(moves=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.booleans()), max_size=30))
def test_what_left_weighs_nothing(moves):
    """Whatever enters, learns and leaves, in any order: at the end no engine has a load, and no choice is of a stranger."""
    balance, inside = Balance(), []
    for rollout, size, leaves in moves:
        asked = work(range(rollout * 1000, rollout * 1000 + size))
        chosen = balance.choose(asked, CACHES)
        assert chosen in CACHES and balance.choose(asked, CACHES) == chosen
        inside.append((asked, chosen, balance.enter(asked, chosen)))
        if leaves:
            asked, chosen, added = inside.pop(0)
            balance.learn(asked, chosen, [range(7)])
            balance.leave(chosen[0], added)
    assert all(balance.load(socket) > 0 for socket in {chosen[0] for _, chosen, _ in inside})
    for _, chosen, added in inside:
        balance.leave(chosen[0], added)
    assert [balance.load(socket) for socket, _ in CACHES] == [0, 0, 0]


def test_turns_of_a_rollout_stay_where_their_prefix_is():
    balance = Balance()
    first, answer = work(range(200)), range(500, 600)
    for _ in range(2):  # two rollouts of one prompt, which say different things
        chosen = balance.choose(first, CACHES)
        balance.enter(first, chosen)
    balance.learn(first, E1, [answer])
    balance.learn(first, E2, [range(700, 800)])
    assert balance.choose(work(range(200), answer, range(50)), CACHES) == E1
    assert balance.choose(work(range(200), range(700, 800), range(50)), CACHES) == E2


def test_a_prefix_of_older_weights_counts_for_nothing():
    balance = Balance()
    asked = work(range(300))
    balance.leave("/e2", balance.enter(asked, E2))
    assert balance.choose(asked, CACHES) == E2
    assert balance.choose(asked, [(socket, 5) for socket, _ in CACHES]) == ("/e0", 5)


def test_a_rollout_goes_on_elsewhere_when_its_engine_is_gone():
    balance = Balance()
    balance.enter(work(range(300)), E2)
    balance.enter(work(range(1000, 1400)), E0)
    assert balance.choose(work(range(400)), (E0, E1)) == E1


@pytest.mark.parametrize("more", (1, 20))
def test_an_engine_with_too_much_gives_rollouts_away(more):
    balance = Balance()
    asked = work(range(400))
    balance.enter(asked, E0)
    for at in range(more):
        balance.enter(work(range(1000 * at, 1000 * at + 500)), E0)
    balance.enter(work(range(50_000, 50_300)), E1)
    balance.enter(work(range(60_000, 60_300)), E2)
    assert (balance.choose(asked, CACHES) == E0) == (more == 1)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 300), min_size=30, max_size=60))
def test_new_rollouts_spread_evenly(sizes):
    """The greedy bound (Graham 1969): no engine has more than the mean and one request."""
    balance, largest = Balance(), 0
    for number, size in enumerate(sizes):
        asked = work(range(number * 1000, number * 1000 + size))
        largest = max(largest, balance.enter(asked, balance.choose(asked, CACHES)))
    loads = [balance.load(socket) for socket, _ in CACHES]
    assert max(loads) <= statistics.mean(loads) + largest
    assert SLACK > 1.0
