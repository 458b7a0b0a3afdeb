"""Bugs that somebody could make, each with a test that must not let it pass.

Owner of no state. A bug replaces `good`, which stands exactly once in `file`, by `bad`. says: what pytest then gives as the error (a
regular expression), so that a test that is red for another reason does not count. torch: its test needs the trainer's runtime.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    good: str
    bad: str
    test: str
    says: str
    torch: bool = False


BUGS = (
    Bug(
        "ack-before-commit", "artd/store/writer.py",
        '                connection.execute("COMMIT")\n            except',
        "                self._loop.call_soon_threadsafe(self._resolve, results, True)\n                threading.Event().wait(0.05)\n"
        '                connection.execute("COMMIT")\n                return\n            except',
        "tests/unit/test_writer.py::test_the_answer_comes_after_the_commit",
        r"assert \(0,\) == \(1,\)",
    ),
    Bug(
        "commit-error-is-a-no", "artd/store/writer.py",
        "                    raise\n                self._disown()\n",
        "                    results = [(future, None, error) for _, future in group]\n                else:\n"
        "                    self._disown()\n",
        "tests/unit/test_writer.py::test_an_error_of_commit_ends_the_daemon_and_answers_nobody",
        "assert False",
    ),
    Bug(
        "no-directory-fsync", "artd/store/fs.py",
        "    fsync_dir(target.parent)\n", "",
        "tests/unit/test_fs.py::test_publish_syncs_both_folders_after_the_rename",
        "'fsync from' != 'fsync to'",
    ),
    Bug(
        "no-fence-check", "artd/dispatch.py",
        "WHERE id = ? AND fence = ? AND state = 'running'", "WHERE id = ? AND fence >= ? * 0 AND state = 'running'",
        "tests/unit/test_commit.py::test_an_old_fence_is_fenced_and_its_files_go",
        r"not enough values to unpack \(expected 1, got 0\)",
    ),
    Bug(
        "a-heartbeat-is-progress", "artd/dispatch.py",
        "        return message.progress != last\n", "        return True\n",
        "tests/unit/test_stall.py::test_a_job_that_stands_still_is_tried_again_after_the_death_of_its_trainer",
        "made no progress for",
    ),
    Bug(
        "no-swap-of-the-newest-step", "artd/commit.py",
        "checkpoint_id IS ? AND step = ?\"", "(checkpoint_id IS ? OR 1) AND (step = ? OR 1)\"",
        "tests/unit/test_commit.py::test_the_newest_checkpoint_is_compared_and_swapped",
        "DID NOT RAISE .*Stale",
    ),
    Bug(
        "dedup-key-expired", "artd/intake.py",
        "t.run_id = ? AND t.key IN", "t.run_id = ? AND t.state = 'queued' AND g.state = 'open' AND t.key IN",
        "tests/unit/test_ingest.py::test_a_duplicate_of_a_trajectory_in_a_closed_group_is_answered",
        "Conflict: group 'g' is sealed",
    ),
    Bug(
        "epoch-used-again", "artd/packing/service.py",
        "SET next_epoch = next_epoch + 1, flush = 0", "SET flush = 0", "tests/unit/test_pack_service.py",
        "assert 1 == 2",
    ),
    Bug(
        "served-before-verified", "workers/artd_workers/engines/push.py",
        "            return canary.verify(committed.manifest.canary, scores)\n",
        "            return canary.Agreement(0.0, 0.0, 1)\n",
        "tests/conformance/test_fake.py::test_a_merged_push_fails[disk-verify-v1.completions-wrong]",
        "no <class '.*PushFailed'> within",
    ),
    Bug(
        "failed-push-leaves-the-engine", "workers/artd_workers/engines/worker.py",
        '        self._broken = self._broken or f"push of {push.name} failed in {phase}: {error}"\n        self._server.kill()\n', "",
        "tests/conformance/test_fake.py::test_a_merged_push_fails[disk-transfer-artd_load_merged-error]",
        "the harness still runs",
    ),
    Bug(
        "another-spawns-pause", "workers/artd_workers/engines/vllm/guard.py",
        "    if route not in ROUTES or told == own():\n", "    if told or route not in ROUTES:\n",
        "tests/conformance/test_fake.py::test_merged[the_servers_own_routes_obey_their_owner]",
        "no EngineError was raised",
    ),
    Bug(
        "live-under-an-old-fence", "artd/push.py",
        "p.id = ? AND p.fence = ? AND p.state = 'sending'", "p.id = ? AND p.fence >= ? * 0 AND p.state = 'sending'",
        "tests/unit/test_push.py::test_live_with_another_fence_changes_nothing",
        "'live' != 'sending'",
    ),
    Bug(
        "answered-before-the-ledger", "workers/artd_workers/gateway/deliver.py",
        "    await ledger.record(exchange, columns)\n", "    asyncio.ensure_future(ledger.record(exchange, columns))\n",
        "tests/gateway/test_ledger.py::test_the_response_waits_for_the_acknowledgement",
        "assert not True",
    ),
    Bug(
        "reap-by-pid-alone", "artd/supervise/guardian.py",
        "        if stat is None or stat.ticks != ticks:\n", "        if stat is None:\n",
        "tests/process/test_reap.py::test_a_signal_reaches_exactly_the_process_that_was_meant",
        "AssertionError: a stranger under that number",
    ),
    Bug(
        "a-first-thread-is-the-process", "artd/supervise/guardian.py",
        "return self.state in DEAD and self.threads <= 1", "return self.state in DEAD",
        "tests/process/test_child.py::test_kill_of_one_whose_first_thread_has_ended",
        "the test left processes behind|assert 1 == 2",
    ),
    Bug(
        "chunks-side-by-side", "workers/artd_workers/trainer/tensor_file.py",
        "        with _MAKING:\n", "        if True:\n",
        "tests/trainer/test_checkpoint.py::test_one_chunk_is_made_at_a_time",
        "AssertionError: two at once", torch=True,
    ),
    Bug(
        "a-dead-engine-is-waited-for", "workers/artd_workers/engines/vllm/server.py",
        "if why := health.lost(self._ask, self._over):", 'if why := "":',
        "tests/engine/test_health.py::test_an_engine_that_dies_between_pushes_is_told",
        "no <class '.*Down'> within",
    ),
    Bug(
        "swapped-gate-and-up", "workers/artd_workers/models/base.py",
        '("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight")',
        '("model.layers.{i}.mlp.up_proj.weight", "model.layers.{i}.mlp.gate_proj.weight")',
        "tests/trainer/test_parity.py",
        r"assert tensor\(\d+\.\d+\) <= 1e-05", torch=True,
    ),
    Bug(
        "dirty-memory-is-trained-on", "workers/artd_workers/trainer/trainer.py",
        "        resident, self.resident, self._staged = self.resident, None, None\n",
        "        resident = self.resident\n", "tests/trainer/test_memory.py",
        "AssertionError: half_a_step", torch=True,
    ),
    Bug(
        "any-key-may-connect", "artd/keys.py",
        "                if _load(path)[0] == public:\n", "                if _load(path)[0]:\n",
        "tests/daemon/test_security.py::test_a_client_of_another_machine",
        "DID NOT RAISE .*NotAllowed",
    ),
    Bug(
        "routes-do-not-stop-sharing", "artd/packing/tree.py",
        "_key(sequence, limit, by_routes)", "_key(sequence, limit, False)",
        "tests/unit/test_packing_routes.py::test_sharing_stops_at_the_first_token_with_other_routes",
        r"assert \(115, 0\) == \(116, 1\)",
    ),
    Bug(
        "retires-what-is-pushed", "artd/retain.py",
        "UNION SELECT checkpoint_id FROM push WHERE state IN ('prepared', 'sending', 'live')\n", "",
        "tests/unit/test_retain.py::test_what_is_under_push_stays",
        r"assert \[3\] == \[0, 1, 2, 3\]",
    ),
    Bug(
        "boot-forgets-running-jobs", "artd/recover.py",
        "        end_attempt(c, now, job, \"killed\", f\"{why} while it ran\")\n", "        pass\n",
        "tests/unit/test_recover.py::test_without_a_result_the_job_waits_again_and_costs_nothing",
        "'running' != 'queued'",
    ),
    Bug(
        "a-served-push-ends-its-pair", "workers/artd_workers/trainer/push.py",
        "        if not self.over.wait(END_S):\n            self.pair.abort()\n", "        self.pair.abort()\n",
        "tests/trainer/test_push_direct.py",
        "PullError: .* passed before the trainer had filled its buffers", torch=True,
    ),
    Bug(
        "a-neighbours-copy-is-a-leftover", "artd/supervise/code.py",
        "        fcntl.flock(handle, fcntl.LOCK_EX)\n", "",
        "tests/process/test_launch.py::test_a_copy_that_another_process_makes_is_not_a_leftover",
        "assert 0 == 1",
    ),
    Bug(
        "goes-on-without-a-hold", "artd/push.py",
        "            await self._hold(sending)\n", "            pass\n",
        "tests/unit/test_hold.py::test_hold_is_asked_when_the_engine_wants_to_pause_and_proceed_sent_when_it_is_confirmed",
        "'Proceed engine'",
    ),
    Bug(
        "pauses-before-it-may", "workers/artd_workers/engines/push.py",
        "            self._hold(push, ahead)\n", "            pass\n",
        "tests/engine/test_harness.py::test_an_engine_is_paused_only_after_the_daemon_said_so",
        "no <class '.*Pausing'> within",
    ),
    Bug(
        "tokens-across-a-push-are-all-the-first-weights", "workers/artd_workers/engines/vllm/sampled.py",
        "        _from(sequence.policy, sampled, self._name)\n", "",
        "tests/engine/test_sampled.py::test_a_request_in_flight_breaks_where_the_push_met_it",
        r"\[\[0, 'pol@1'\]\] != \[\[0, 'pol@1'\], \[4, 'pol@2'\]\]",
    ),
    Bug(
        "another-fence-comes-over-nccl", "workers/artd_workers/engines/direct/wire.py",
        "        if found != self._expected:\n", "        if False:\n",
        "tests/trainer/test_wired.py::test_a_stale_trainers_header_is_refused_and_nothing_is_copied",
        "Regex pattern did not match", torch=True,
    ),
    Bug(
        "one-process-is-missing-from-the-offer", "workers/artd_workers/engines/direct/link.py",
        '    cover.check("the engine\'s", names, [tensor.numel() for tensor in tensors], pieces)\n', "",
        "tests/trainer/test_feeds.py::test_an_offer_that_is_not_whole_is_not_opened",
        "DID NOT RAISE .*CoverError", torch=True,
    ),
    Bug(
        "the-checkpoint-is-told-before-it-is-written", "workers/artd_workers/trainer/staging.py",
        "        synced.result()\n        os.fsync(handle)\n", "        synced.result()\n",
        "tests/trainer/test_checkpoint.py::test_every_file_is_durable_before_the_manifest_is_begun",
        r"max\(\) arg is an empty sequence", torch=True,
    ),
    Bug(
        "a-further-sample-is-the-first", "client/artd_client/samples.py",
        "        numbers.next = max(numbers.next, mine + 1)\n", "",
        "tests/unit/test_client.py::test_an_equal_sample_of_a_closed_group_is_a_further_one",
        "assert 1 == 3",
    ),
    Bug(
        "a-stopping-daemon-ends-calls", "client/artd_client/connection.py",
        "        if isinstance(refusal, Draining):", "        if False:",
        "tests/unit/test_client_restart.py::test_what_a_stopping_daemon_did_not_take_is_sent_to_the_next_one",
        "assert not True",
    ),
    Bug(
        "a-cancelled-scope-keeps-the-connection", "client/artd_client/connection.py",
        "        self._task.cancel()\n        if self._link", "        self._task.cancel()\n        await asyncio.sleep(0)\n        if self._link",
        "tests/unit/test_client_cancel.py::test_a_client_in_a_cancelled_scope_is_closed_whole",
        "CancelledError|TimeoutError",
    ),
    Bug(
        "an-engine-lives-on-after-a-failed-push", "artd/push.py",
        "        if self._unknown is not None and self._unknown ==", "        if False and self._unknown ==",
        "tests/unit/test_push.py::test_an_engine_that_lives_on_after_its_push_failed_is_ended",
        r"assert \(?0 == 1",
    ),
    Bug(
        "jobs-are-looked-for-row-by-row", "schema/artd_schema/sql/0001_initial.sql",
        "CREATE INDEX job_state ON job (state, run_id);", "CREATE INDEX job_state ON job (run_id, step);",
        "tests/unit/test_plans.py::test_no_service_reads_a_whole_table",
        "SCAN",
    ),
    Bug(
        "a-finished-run-leaves-its-jobs", "artd/runs.py",
        '                give_up(c, now, row["id"], name)\n', "                pass\n", "tests/unit/test_jobs.py",
        "'queued' != 'cancelled'",
    ),
    Bug(
        "rare-steps-are-warmed-up-first", "workers/artd_workers/engines/vllm/warm.py",
        "met.most_common()", "reversed(met.most_common())",
        "tests/engine/test_warm.py::test_one_step_for_each_form_and_what_most_are_first",
        r"assert \[2, 1, 8, 3, 5\] == \[5, 3, 8, 1, 2\]",
    ),
    Bug(
        "a-stop-waits-for-room-for-ever", "artd/store/writer.py",
        "refused += self.hurried.is_set()", "refused += 0",
        "tests/unit/test_disk.py::test_a_daemon_that_ends_gives_a_commit_without_room_three_more_tries",
        "AssertionError: it waits for ever",
    ),
    Bug(
        "a-part-of-the-moments-is-not-read", "workers/artd_workers/trainer/checkpoint.py",
        "for file in moments for key, tensor", "for file in moments[:1] for key, tensor",
        "tests/trainer/test_checkpoint.py::test_large_moments_are_files_in_the_order_of_their_names",
        "Extra items in the right set", torch=True,
    ),
    Bug(
        "truncated-samples-are-paid-for", "workers/artd_workers/gateway/turns.py",
        "(bad := untrainable(sampling))", "(bad := untrainable(Sampling()))", "tests/gateway/test_ledger.py",
        "KeyError: 'error'",
    ),
    Bug(
        "a-missing-gpu-is-left-to-vllm", "workers/artd_workers/engines/vllm/server.py",
        'refusal("engine.device", self.config.spec.engine.device)', '""', "tests/engine/test_harness.py",
        "the server does not answer",
    ),
    Bug(
        "the-experts-kernel-is-compiled-unaligned", "workers/artd_workers/engines/direct/kernels.py",
        "(5, count + count % 2)", "(5, count)",
        "tests/trainer/test_sum_kernels.py::test_every_table_has_the_alignment_that_its_kernels_were_compiled_for",
        r"assert \[0, 8, 0, 8, 0\] == \[0, 0, 0, 0, 0\]", torch=True,
    ),
    Bug(
        "every-model-rounds-alike", "workers/artd_workers/trainer/canary.py",
        "granted = (0.0, 0.0) if engine_dtype == \"float32\" else room(", "granted = (0.0, 0.0) if True else room(",
        "tests/trainer/test_canary.py::test_a_deep_model_may_be_as_far_off_as_bf16_makes_it",
        r"assert \(tensor\(.*\) < \(0\.05 \* 0\.6\)\)", torch=True,
    ),
    Bug(
        "a-tied-head-stays-packed", "workers/artd_workers/engines/vllm/reload.py",
        "        pack_tied_heads(self._model)\n", "",
        "tests/engine/test_moe_real.py::test_every_weight_goes_in_from_disk_and_live_time_and_again",
        "canary failed",
    ),
    Bug(
        "packs-on-a-full-disk", "artd/packing/service.py",
        "            elif self._lacks(0):\n", "            elif False:\n",
        "tests/unit/test_disk.py::test_nothing_is_packed_while_there_is_no_room",
        "TimeoutError",
    ),
    Bug(
        "nobody-collects", "artd/services.py",
        "self._collector.run, self._logs.run)", "self._logs.run)",
        "tests/unit/test_services.py::test_files_without_rows_go_and_large_logs_begin_anew",
        "AssertionError: nobody collects",
    ),
    Bug(
        "logs-grow-for-ever", "artd/services.py",
        "self._collector.run, self._logs.run)", "self._collector.run)",
        "tests/unit/test_services.py::test_files_without_rows_go_and_large_logs_begin_anew",
        "AssertionError: the log goes on",
    ),
    Bug(
        "another-port-after-a-restart", "artd/workforce.py",
        "self.settings.gateway.port or int(get_meta(c, \"gateway_port\", \"0\"))", "self.settings.gateway.port",
        "tests/daemon/test_rollout.py::test_an_openai_client_goes_on_over_a_restart_at_the_same_address",
        "APIConnectionError",
    ),
)  # fmt: skip
