"""Bugs of the engine workers, and of what all workers share."""

from __future__ import annotations

from .bug import Bug

BUGS = (
    Bug(
        "adapter-gone-under-a-request", "workers/artd_workers/engines/push.py",
        "        self._left.append(_Left(name, adopted.folder))\n", "        shutil.rmtree(adopted.folder)\n",
        "tests/engine/test_push.py::test_an_adapter_is_there_for_as_long_as_a_request_may_need_it",
        "assert .*False",
    ),
    Bug(
        "adapter-config-not-hashed", "workers/artd_workers/engines/checkpoint.py",
        ".hexdigest() != _find_sha(checkpoint, ADAPTER_CONFIG_FILE):", '.hexdigest() == "":',
        "tests/engine/test_push.py::test_a_damaged_adapter_config_is_refused", "DID NOT RAISE",
    ),
    Bug(
        "adapter-sums-not-compared", "workers/artd_workers/engines/push.py",
        "            found = self._adapter.check_adapter(folder, committed.weights.held, deadline)\n",
        '            found = {"tensors": len(committed.weights.tensors)}\n',
        "tests/engine/test_push.py::test_an_adapter_whose_sums_in_the_engine_are_others_is_never_live", "DID NOT RAISE",
    ),
    Bug(
        "adapter-change-not-bounded", "workers/artd_workers/engines/canary.py",
        "    if change.significant and not (", "    if False and not (",
        "tests/engine/test_parts.py::test_an_adapter_that_changes_something_else_is_refused", "DID NOT RAISE",
    ),
    Bug(
        "eos-in-the-text", "workers/artd_workers/engines/vllm/stops.py",
        "    return stop is None or (isinstance", "    return (isinstance",
        "tests/gateway/test_flow.py::test_the_eos_is_no_text_although_special_tokens_are", "assert 'Par\\$' == 'Par'",
    ),
    Bug(
        "engine-kind-is-not-read", "workers/artd_workers/engines/worker.py",
        "engine_of(config.spec.engine.kind)", 'engine_of("vllm")',
        "tests/conformance/test_abacus.py::test_merged[is_healthy]", "not a vLLM server|did not answer|has ended",
    ),
    Bug(
        "a-base-of-other-bytes", "workers/artd_workers/base_files.py",
        "            if sha != file.sha256:\n", "            if not sha:\n",
        "tests/unit/test_base_files.py::test_other_bytes_are_refused_though_size_and_time_are_the_same",
        "DID NOT RAISE",
    ),
    Bug(
        "a-hung-engine-is-busy", "workers/artd_workers/engines/process/progress.py",
        "            self.seconds += passed\n", "            self.seconds += 0.0\n",
        "tests/engine/test_progress.py::test_what_stands_still_for_too_long_is_ended",
        "assert False == True|assert bool",
    ),
    Bug(
        "an-engine-that-never-answered-has-no-requests", "workers/artd_workers/engines/vllm/work.py",
        "    return Work(max(counted, in_flight),", "    return Work(counted,",
        "tests/engine/test_progress.py::test_the_marks_of_vllms_metrics",
        "assert 1 == 7",
    ),
    Bug(
        "a-push-is-a-standstill", "workers/artd_workers/engines/process/progress.py",
        "        if pushing or busy():\n", "        if pushing and busy() and False:\n",
        "tests/engine/test_progress.py::test_a_push_that_pauses_for_longer_than_the_limit_goes_on",
        "assert True != True|!= True",
    ),
    Bug(
        "a-choice-is-forgotten-while-its-response-runs", "workers/artd_workers/engines/vllm/tokens/sample_book.py",
        "if _request(key) not in running]", "if _request(key) not in running or True]",
        "tests/engine/test_progress.py::test_an_ended_choice_is_known_as_long_as_another_one_of_its_response_runs",
        "slow#0",
    ),
    Bug(
        "a-slow-disk-is-a-failure", "workers/artd_workers/deadline.py",
        "        if (now := self._mark()) != self._seen:\n", "        if (now := self._mark()) is None:\n",
        "tests/engine/test_progress.py::test_a_push_from_a_slow_disk_goes_on_as_long_as_tensors_come",
        "FileNotFoundError|no <class",
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
        "half-a-stop-string-is-shown", "workers/artd_workers/engines/vllm/text/cut.py",
        "        if self._hold:\n", "        if self._hold > 9:\n",
        "tests/engine/test_text.py::test_no_part_of_a_stop_string_is_ever_shown", "assert",
    ),
    Bug(
        "a-stop-token-is-reasoning", "workers/artd_workers/engines/vllm/dialect.py",
        "                if stops.says_nothing(source, params):", "                if stops.says_nothing(source, params) and not body:",
        "tests/gateway/test_tools.py::test_a_lone_stop_token_is_no_reasoning", "im_end",
    ),
    Bug(
        "a-dead-engine-is-waited-for", "workers/artd_workers/engines/process/server.py",
        "if why := health.await_loss(self._ask, self._over):", 'if why := "":',
        "tests/engine/test_health.py::test_an_engine_that_dies_between_pushes_is_told",
        "no <class '.*Down'> within",
    ),
    Bug(
        "pauses-before-it-may", "workers/artd_workers/engines/push.py",
        "            self._hold(push, ahead)\n", "            pass\n",
        "tests/engine/test_harness.py::test_an_engine_is_paused_only_after_the_daemon_said_so",
        "no <class '.*Pausing'> within",
    ),
    Bug(
        "tokens-across-a-push-are-all-the-first-weights", "workers/artd_workers/engines/vllm/tokens/sample_book.py",
        "        _from(sequence.policy, sampled, self._name)\n", "",
        "tests/engine/test_sampled.py::test_a_request_in_flight_breaks_where_the_push_met_it",
        r"\[\[0, 'pol@1'\]\] != \[\[0, 'pol@1'\], \[4, 'pol@2'\]\]",
    ),
    Bug(
        "another-fence-comes-over-nccl", "workers/artd_workers/engines/pull/nccl_feed.py",
        "        if found != self._expected:\n", "        if False:\n",
        "tests/trainer/test_wired.py::test_a_stale_trainers_header_is_refused_and_nothing_is_copied",
        "Regex pattern did not match", torch=True,
    ),
    Bug(
        "one-process-is-missing-from-the-offer", "workers/artd_workers/engines/pull/open_offer.py",
        '    coverage.check("the engine\'s", names, [tensor.numel() for tensor in tensors], pieces)\n', "",
        "tests/trainer/test_feeds.py::test_an_offer_that_is_not_whole_is_not_opened",
        "DID NOT RAISE .*CoverError", torch=True,
    ),
    Bug(
        "rare-steps-are-warmed-up-first", "workers/artd_workers/engines/vllm/warm.py",
        "met.most_common()", "reversed(met.most_common())",
        "tests/engine/test_warm.py::test_one_step_for_each_form_and_what_most_are_first",
        r"assert \[2, 1, 8, 3, 5\] == \[5, 3, 8, 1, 2\]",
    ),
    Bug(
        "a-missing-gpu-is-left-to-vllm", "workers/artd_workers/engines/process/server.py",
        'refusal("engine.device", self.config.spec.engine.device)', '""', "tests/engine/test_harness.py",
        "the server does not answer",
    ),
    Bug(
        "the-experts-kernel-is-compiled-unaligned", "workers/artd_workers/transfer/checksum_kernels.py",
        "(5, count + count % 2)", "(5, count)",
        "tests/trainer/test_sum_kernels.py::test_every_table_has_the_alignment_that_its_kernels_were_compiled_for",
        r"assert \[0, 8, 0, 8, 0\] == \[0, 0, 0, 0, 0\]", torch=True,
    ),
    Bug(
        "a-tied-head-stays-packed", "workers/artd_workers/engines/vllm/weights/reload.py",
        "        pack_tied_heads(self._model)\n", "",
        "tests/engine/test_moe_real.py::test_every_weight_goes_in_from_disk_and_live_time_and_again",
        "canary failed",
    ),
    Bug(
        "package-imported-from-anywhere", "workers/artd_workers/packages.py",
        "    if copy is None:\n", '    copy = copy or Path("/nowhere")\n    if False:\n',
        "tests/trainer/test_packages.py::test_code_that_is_not_the_copy_does_not_run", "is damaged", torch=True,
    ),
    Bug(
        "damaged-package-imported", "workers/artd_workers/packages.py",
        "    if (found := digest_files(read_tree(copy))) != code.digest:\n", "    if not (found := digest_files(read_tree(copy))):\n",
        "tests/trainer/test_packages.py::test_a_damaged_copy_does_not_run", "it ran|SystemExit", torch=True,
    ),
)  # fmt: skip
