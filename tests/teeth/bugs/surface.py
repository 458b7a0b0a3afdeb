"""Bugs of what users touch: API, command line, client."""

from __future__ import annotations

from .bug import Bug

BUGS = (
    Bug(
        "the-dashboard-is-open-to-all", "artd/cli/dashboard/auth.py",
        "if request.url.path in OPEN or self._may_read(request):", "if request.url.path.startswith(OPEN + (\"/api\",)) or self._may_read(request):",
        "tests/cli/test_dashboard.py::test_whoever_has_no_token_reads_nothing", "assert ",
    ),
    Bug(
        "pages-parse-what-models-wrote", "artd/cli/dashboard/static/dom.js",
        "  return element;\n", "  element.innerHTML = children.join(\"\");\n  return element;\n",
        "tests/cli/test_dashboard.py::test_no_answer_may_run_a_script_that_is_not_a_file_of_artd", "assert not ",
    ),
    Bug(
        "open-pages-hear-nothing", "artd/cli/dashboard/live.py",
        "if mark != self.mark:", "if mark.event < 0:",
        "tests/cli/test_dashboard.py::test_an_open_page_hears_of_each_commit_and_of_the_daemon", "ExceptionGroup|TimeoutError|FAILED",
    ),
    Bug(
        "waits-outlive-their-clients", "artd/api/requests.py",
        "            task.cancel()\n\n    def _submit_fast", "            task.done()\n\n    def _submit_fast",
        "tests/attack/test_waits.py::test_the_waits_of_a_client_that_left_end",
        "no sign|AssertionError|TimeoutError",
    ),
    Bug(
        "a-typo-proposes-a-change", "artd/cli/outcome.py",
        "[word for word in known if word not in NEVER_PROPOSED]", "known",
        "tests/cli/test_manners.py::test_no_mistyped_word_proposes_a_change", "assert",
    ),
    Bug(
        "a-tab-types-commands", "artd/cli/artctl/completion.py",
        "each.startswith(last) and _HARMLESS.fullmatch(each)", "each.startswith(last)",
        "tests/cli/test_manners.py::test_completion", "AssertionError",
    ),
    Bug(
        "documents-hold-terminal-codes", "artd/cli/show.py",
        "ensure_ascii=False).translate(_IN_JSON)", "ensure_ascii=False)",
        "tests/cli/test_samples.py::test_what_models_wrote_is_text", "assert .* == set",
    ),
    Bug(
        "retry-lifts-every-pause", "artd/api/job_orders.py",
        "    emit(c, now, job[\"run\"], \"job.retried\", job_id)\n    pauses.lift(c, now, job[\"run_id\"], pauses.of_job(job_id))\n",
        "    emit(c, now, job[\"run\"], \"job.retried\", job_id)\n    pauses.lift(c, now, job[\"run_id\"])\n",
        "tests/unit/test_jobs.py::test_discard_and_retry_lift_no_pause_but_the_quarantines",
        "'active' == 'paused'",
    ),
    Bug(
        "a-stopped-daemon-is-healthy", "artd/cli/health.py",
        "    if max(loop, writer) <= pulse.STALE_S:\n", "    if max(loop, writer) <= 60 * pulse.STALE_S:\n",
        "tests/unit/test_health.py::test_an_old_heartbeat_is_a_problem",
        "hangs: no sign of life for 6 s' in ''",
    ),
    Bug(
        "a-stopped-daemon-is-started-again", "artd/cli/keep.py",
        "            if self._told or code in (OK, INTERRUPTED) or not was_ready:\n", "            if not was_ready:\n",
        "tests/attack/test_restart.py::test_what_ended_by_itself_starts_again_until_the_limit",
        "assert 3 == 1|== 1",
    ),
    Bug(
        "stop-forgets-the-keeper", "artd/cli/artd/stop.py",
        "    if kept is not None:\n", "    if kept is not None and not data:\n",
        "tests/attack/test_restart.py::test_a_stop_meets_a_keeper_between_two_daemons",
        "TimeoutExpired|timed out after 0|assert 3 == 0",
    ),
    Bug(
        "busy-is-not-waited-out", "client/artd_client/connection.py",
        "elif isinstance(refusal, Busy) and", "elif False and isinstance(refusal, Busy) and",
        "tests/unit/test_client_connection.py::test_a_busy_daemon_is_asked_again_within_the_time_out",
        "Busy: full",
    ),
    Bug(
        "gc-alone-trusts-the-clock", "artd/cli/artctl/gc.py",
        "clock_jumps.boot(c, store.clock.now_ms())", "None",
        "tests/attack/test_disks.py::test_no_daemon_nothing_by_age_under_a_clock_that_jumped", "assert",
    ),
    Bug(
        "blocking-client-falls-behind", "client/artd_client/run.py",
        "async def flush(self) -> None:", "async def flush(self, now: bool = True) -> None:",
        "tests/unit/test_blocking_client.py::test_the_blocking_client_is_that_of_the_source", "sync.py is not current",
    ),
    Bug(
        "equal-samples-are-one", "client/artd_client/run.py",
        "uuid.uuid4().hex if turns", "digest(to_json([group, turns])) if turns",
        "tests/unit/test_client.py::test_every_call_by_value_is_a_sample_of_its_own",
        "assert",
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
        "package-digest-not-checked-on-replay", "artd/cli/package_code.py",
        "    if (found := digest_files(files)) != code.digest:\n", '    if (found := digest_files(files)) == "":\n',
        "tests/unit/test_packages.py::test_a_replay_takes_the_copy_of_the_digest_or_nothing", "DID NOT RAISE",
    ),
)  # fmt: skip
