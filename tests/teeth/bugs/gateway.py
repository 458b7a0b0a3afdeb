"""Bugs of the gateway."""

from __future__ import annotations

from .bug import Bug

BUGS = (
    Bug(
        "no-salt-in-lora-mode", "workers/artd_workers/gateway/request/flow.py",
        'str(place.served.epoch)', 'str(place.served.epoch) if place.engine.mode == "merged" else ""',
        "tests/gateway/test_ledger.py::test_in_lora_mode_the_epoch_is_the_adapters", "an adapter of another lineage may come",
    ),
    Bug(
        "one-dialect-for-all", "workers/artd_workers/gateway/engine/client.py",
        "dialect_of(kind)", 'dialect_of("vllm")',
        "tests/conformance/test_gateway.py::test_a_dialect[abacus-a_chat_is_rendered_generated_and_derendered]",
        "KeyError: 'choices'",
    ),
    Bug(
        "a-burst-is-dropped", "workers/artd_workers/gateway/http/patience.py",
        "            if now - self._waiting[oldest] < GRACE_S:\n", "            if now - self._waiting[oldest] < 0:\n",
        "tests/gateway/test_patience.py::test_connections_that_came_in_one_turn_of_the_loop_are_not_dropped_for_each_other",
        "assert not True",
    ),
    Bug(
        "each-gateway-listens-for-itself", "workers/artd_workers/gateway/worker.py",
        "    listener = socket.socket(fileno=int(number))\n", "    listener = socket.create_server((\"127.0.0.1\", 0))\n",
        "tests/attack/test_health.py::test_the_gateway_keeps_its_address_and_what_comes_meanwhile_waits",
        "ConnectError",
    ),
    Bug(
        "answered-before-the-ledger", "workers/artd_workers/gateway/request/deliver.py",
        "    await ledger.record(entry.exchange, entry.columns)\n",
        "    asyncio.ensure_future(ledger.record(entry.exchange, entry.columns))\n",
        "tests/gateway/test_ledger.py::test_the_response_waits_for_the_acknowledgement",
        "assert not True",
    ),
    Bug(
        "a-stream-closes-before-the-ledger", "workers/artd_workers/gateway/request/asked.py",
        "        await asyncio.shield(writing)\n", "        asyncio.shield(writing)\n",
        "tests/gateway/test_stream.py::test_nothing_that_closes_the_stream_comes_before_the_acknowledgement", "DONE",
    ),
    Bug(
        "a-broken-stream-is-trained", "workers/artd_workers/gateway/request/parts.py",
        'replace(made, job=replace(made.job, split="eval"))', "made",
        "tests/gateway/test_stream.py::test_a_client_that_goes_frees_its_engine_and_leaves_what_it_saw", "'train'",
    ),
    Bug(
        "a-grammar-is-trained", "workers/artd_workers/gateway/request/sense.py",
        '        del request["sampling_params"][name]\n', "        pass\n",
        "tests/gateway/test_tools.py::test_a_grammar_is_dropped_for_training_and_the_reply_says_so", "untrainable_sampling|dropped",
    ),
    Bug(
        "an-unknown-field-is-ignored", "workers/artd_workers/gateway/request/fields.py",
        "            raise refusal(name)\n    if", "            continue\n    if",
        "tests/gateway/test_tools.py::test_a_field_that_nobody_would_read_is_refused_by_name", "KeyError|200",
    ),
    Bug(
        "an-answer-in-two-messages", "workers/artd_workers/gateway/apis/responses.py",
        'new or last.get("role") != "assistant"', 'new or field or last.get("role") != "assistant"',
        "tests/gateway/test_responses.py::test_items_become_one_message_an_answer", "assert",
    ),
    Bug(
        "a-thread-is-ignored", "workers/artd_workers/gateway/apis/messages.py",
        '        if body.get("thread"):\n', '        if body.get("thread") == "never":\n',
        "tests/gateway/test_messages.py::test_a_thread_is_refused_so_that_the_tool_runner_goes_on_without", "KeyError",
    ),
    Bug(
        "who-does-not-read-keeps-its-place", "workers/artd_workers/gateway/http/streamed.py",
        "            async with asyncio.timeout(self._read_s):\n", "            async with asyncio.timeout(None):\n",
        "tests/gateway/test_stream.py::test_a_client_that_does_not_read_loses_its_place", "AssertionError|Timeout",
    ),
    Bug(
        "a-ledger-refuses-late", "workers/artd_workers/gateway/request/flow.py",
        "        refuse_too_large(job.body, requests, shape, place.engine.max_model_len, self._limits)\n", "",
        "tests/gateway/test_experts.py::test_what_cannot_fit_the_ledger_is_refused_before_it_is_sampled",
        "the response's ledger entry has",
    ),
    Bug(
        "a-task-group-that-fails", "workers/artd_workers/gateway/request/flow.py",
        "            return await asyncio.gather(*calls)\n",
        "            async with asyncio.TaskGroup() as group:\n"
        "                same = [group.create_task(asyncio.wait_for(call, None)) for call in calls]\n"
        "            return [call.result() for call in same]\n"
        "        except BaseExceptionGroup as errors:\n"
        "            raise errors.exceptions[0] from None\n",
        "tests/gateway/test_errors.py::test_a_failed_generation_ends_the_others_and_leaves_no_cancel_request",
        "assert 1 == 0",
    ),
    Bug(
        "truncated-samples-are-paid-for", "workers/artd_workers/gateway/request/turns.py",
        "(bad := untrainable(sampling))", "(bad := untrainable(Sampling()))", "tests/gateway/test_ledger.py",
        "KeyError: 'error'",
    ),
    Bug(
        "repeated-request-trained-twice", "artd/rollouts/by_name.py",
        "e.delivery IN ('pending', 'delivered')\"", "e.delivery IN ('pending', 'delivered', 'lost')\"",
        "tests/gateway/test_rollouts.py::test_a_reply_that_was_lost_and_never_asked_again_is_not_trained", "assert .* == ",
    ),
    Bug(
        "repeated-request-sampled-again", "workers/artd_workers/gateway/request/flow.py",
        "job.asked is None or not job.asked.repeats", "job.asked is None or job.asked.repeats",
        "tests/gateway/test_rollouts.py::test_a_stored_reply_is_the_reply_that_was_lost[/v1/messages-False]", "sampled again",
    ),
    Bug(
        "superseded-row-trained", "artd/tables/exchanges.py",
        "    c.execute(\n        f\"UPDATE exchange SET delivery = 'superseded' WHERE rollout_id = ? AND request = ?",
        "    c.execute(\n        f\"UPDATE exchange SET delivery = 'pending' WHERE rollout_id = ? AND request = ?",
        "tests/gateway/test_rollouts.py::test_what_is_asked_again_otherwise_is_superseded_and_never_trained", "superseded",
    ),
    Bug(
        "rollout-in-the-order-of-ends", "artd/rollouts/by_name.py", 'ORDER = "e.place, e.choice"', 'ORDER = "e.id"',
        "tests/unit/test_rollouts.py::test_a_rollout_is_one_trajectory_in_the_order_of_its_requests", "assert .* == ",
    ),
    Bug(
        "reply-of-a-dead-gateway-forgotten", "artd/tables/exchanges.py", "AND place < ?))", "AND place < 0 * ?))",
        "tests/gateway/test_rollouts.py::test_a_reply_is_found_again_after_the_gateway_died", "assert .* == ",
    ),
    Bug(
        "lost-reply-called-delivered", "workers/artd_workers/gateway/http/streamed.py",
        "            whole = there\n", "            whole = True\n",
        "tests/gateway/test_rollouts.py::test_a_client_that_goes_before_the_last_piece_has_not_had_it", "assert .* == ",
    ),
    Bug(
        "rollout-expires-in-parts", "artd/retention/collector.py", " AND (o.state IS NOT 'open' OR o.touched < ?1) ORDER", " ORDER",
        "tests/unit/test_rollouts.py::test_a_rollout_that_nobody_submits_expires_whole_and_says_so", "assert .* == ",
    ),
    Bug(
        "turns-go-anywhere", "workers/artd_workers/gateway/request/flow.py",
        "self._table.enter(self._table.settle(place, made.work), made.work)", "self._table.enter(place, made.work)",
        "tests/gateway/test_routing.py::test_new_rollouts_spread_and_their_turns_stay_where_the_prefix_is", "assert",
    ),
    Bug(
        "answers-are-not-remembered", "workers/artd_workers/gateway/balance/balance.py",
        "            self._holders.add(work.prefix.extend(answer), cache, len(work.prefix.hashes))\n", "",
        "tests/unit/test_balance.py::test_turns_of_a_rollout_stay_where_their_prefix_is", "assert .* == ",
    ),
    Bug(
        "an-overloaded-engine-keeps-all", "workers/artd_workers/gateway/balance/balance.py",
        "        if stays and self.load(best[0]) <= SLACK * mean + work.tokens:\n", "        if stays:\n",
        "tests/unit/test_balance.py::test_an_engine_with_too_much_gives_rollouts_away", "assert .* == ",
    ),
    Bug(
        "a-failed-request-waits-for-the-daemon", "workers/artd_workers/gateway/request/flow.py",
        "return self._table.has_other(place, failed) or await", "return await",
        "tests/gateway/test_routing.py::test_a_request_that_an_engine_fails_goes_to_another_one_at_once", "502",
    ),
)  # fmt: skip
