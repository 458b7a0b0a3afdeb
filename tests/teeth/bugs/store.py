"""Bugs of what keeps data: database, blobs, retention, backups, data folder."""

from __future__ import annotations

from .bug import Bug

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
        "a-page-sorts-a-whole-run", "artd/store/pages.py",
        '(f"run_id = ? AND state = ?{split}", (run, state, *value)) for run in runs for state in wanted',
        '("run_id = ? AND state >= ?", (run, "")) for run in runs',
        "tests/unit/test_plans.py::test_no_listing_reads_or_sorts_a_whole_table",
        "TEMP B-TREE",
    ),
    Bug(
        "the-ledger-grows-for-ever", "artd/retention/collector.py",
        "        if not limit or kept <= limit:\n", "        if limit:\n",
        "tests/attack/test_slices.py::test_the_ledger_keeps_no_more_bytes_than_it_may",
        "assert",
    ),
    Bug(
        "clients-ask-for-ever", "artd/store/readers.py",
        " or (self.end is not None and time.monotonic() > self.end)", "",
        "tests/attack/test_reads.py::test_a_question_that_takes_for_ever_holds_nobody_up",
        "TimeoutError",
    ),
    Bug(
        "clients-share-one-connection", "artd/store/store.py",
        "return await self._clients.run(fn)", "return await self._scans.run(fn)",
        "tests/attack/test_reads.py::test_a_question_that_takes_for_ever_holds_nobody_up",
        "TimeoutError",
    ),
    Bug(
        "readers-keep-the-log-growing", "artd/store/writer.py",
        "self.on_crowded(not folded and size", "self.on_crowded(False and size",
        "tests/attack/test_reads.py::test_readers_one_after_the_other_do_not_let_the_log_grow_for_ever",
        "of 15 MB written",
    ),
    Bug(
        "no-directory-fsync", "artd/store/fs.py",
        "    fsync_dir(target.parent)\n", "",
        "tests/unit/test_fs.py::test_publish_syncs_both_folders_after_the_rename",
        "'fsync from' != 'fsync to'",
    ),
    Bug(
        "a-kill-gives-time-back", "artd/retention/clock_jumps.py",
        "        elif await self._store.read(WAITING):\n", "        elif False:\n",
        "tests/unit/test_times.py::test_a_kill_gives_an_open_group_no_time_back",
        r"assert \[600",
    ),
    Bug(
        "a-slow-drift-is-forgotten", "artd/retention/clock_jumps.py",
        "        if abs(drift) > DRIFT_MS:\n",
        "        self._offset = self._offset if abs(drift) > DRIFT_MS else offset\n        if abs(drift) > DRIFT_MS:\n",
        "tests/unit/test_times.py::test_a_clock_that_drifts_slowly_is_followed",
        "assert",
    ),
    Bug(
        "a-deletion-takes-another-runs-rows", "artd/retention/deletion.py",
        "        find = f\"SELECT id FROM {table} WHERE run_id = ? LIMIT ?\"\n",
        "        find = f\"SELECT id FROM {table} WHERE run_id >= ? LIMIT ?\"\n",
        "tests/unit/test_deletion.py::test_every_commit_of_a_deletion_keeps_every_promise",
        "AssertionError|IntegrityError",
    ),
    Bug(
        "one-run-that-cannot-be-read-ends-all", "artd/store/views.py",
        "    return [row for row in rows if not unreadable(row)]\n", "    return list(rows)\n",
        "tests/unit/test_spec_values.py::test_a_run_whose_spec_cannot_be_read_is_paused_and_everything_else_lives",
        "assert",
    ),
    Bug(
        "a-finished-run-is-settled-too-early", "artd/retention/checkpoints.py",
        "            if not found and c.execute(HELD, {\"run\": run}).fetchone() is None:\n", "            if not found:\n",
        "tests/unit/test_fleet.py::test_a_finished_run_is_looked_at_until_nothing_holds_its_checkpoints", "assert",
    ),
    Bug(
        "rows-of-any-structs-are-read", "artd/store/migrate.py",
        "    _require_form(connection)\n", "",
        "tests/unit/test_spec_values.py::test_rows_of_other_structs_are_a_schema_mismatch",
        "DID NOT RAISE",
    ),
    Bug(
        "no-swap-of-the-newest-step", "artd/tables/runs.py",
        "checkpoint_id IS ? AND step = ?\"", "(checkpoint_id IS ? OR 1) AND (step = ? OR 1)\"",
        "tests/unit/test_commit.py::test_the_newest_checkpoint_is_compared_and_swapped",
        "DID NOT RAISE .*Stale",
    ),
    Bug(
        "epoch-used-again", "artd/tables/runs.py",
        "SET next_epoch = next_epoch + 1, flush = 0", "SET flush = 0", "tests/unit/test_pack_service.py",
        "assert 1 == 2",
    ),
    Bug(
        "retires-what-is-pushed", "artd/retention/checkpoints.py",
        "UNION SELECT checkpoint_id FROM push WHERE state IN ('prepared', 'sending', 'live')\n", "",
        "tests/unit/test_retain.py::test_what_is_under_push_stays",
        r"assert \[3\] == \[0, 1, 2, 3\]",
    ),
    Bug(
        "takes-any-folder", "artd/datadir/folder.py",
        "    if not is_free(root):\n        _require_ours(root)\n", "    if not is_free(root):\n",
        "tests/attack/test_folders.py::test_nothing_is_taken_that_holds_anything", "DID NOT RAISE",
    ),
    Bug(
        "deletes-unknown-checkpoints", "artd/retention/checkpoints.py",
        "(found.gone if ended or folder in known else found.unknown)", "(found.gone)",
        "tests/unit/test_retain.py::test_sweep_deletes_what_an_attempt_left_and_keeps_what_no_row_knows", "l0-s000009-j9-f1",
    ),
    Bug(
        "empties-tmp", "artd/retention/checkpoints.py",
        " if STAGED.fullmatch(path.name) and path.is_dir()]", "]",
        "tests/unit/test_recover.py::test_leftovers_are_swept_and_committed_folders_are_not", "Not a directory|only what bears",
    ),
    Bug(
        "collects-strangers-files", "artd/store/blobs.py",
        "found.st_mtime < self._born or", "True or",
        "tests/attack/test_folders.py::test_the_collection_leaves_what_artd_did_not_make", "assert",
    ),
    Bug(
        "told-once-on-a-full-disk", "artd/store/fs.py",
        "        _later[name] = write\n", "        _later[name] = lambda: None\n",
        "tests/attack/test_disks.py::test_a_file_that_found_no_room_is_written_when_there_is_some", "No such file|assert",
    ),
    Bug(
        "quota-is-a-broken-disk", "artd/store/room.py",
        "    if code not in UNCLEAR or folder is None:\n", "    if True:\n",
        "tests/attack/test_disks.py::test_a_quota_is_a_full_disk_to_the_writer", "TimeoutError",
    ),
    Bug(
        "inodes-are-not-looked-at", "artd/datadir/disk.py",
        "found.f_files and found.f_favail < marks[1]", "False",
        "tests/attack/test_disks.py::test_inodes_count_as_room", "DID NOT RAISE",
    ),
    Bug(
        "builds-on-a-log-in-memory", "artd/store/store.py",
        "        if time.monotonic() > end:\n            raise DatabaseInUse(", "        if time.monotonic() > end:\n            return\n            raise DatabaseInUse(",
        "tests/attack/test_disks.py::test_nothing_is_built_on_a_log_that_is_not_in_the_database", "DID NOT RAISE",
    ),
    Bug(
        "adopts-out-of-the-page-cache", "artd/recover.py",
        "        await anyio.to_thread.run_sync(fs.write_again, folder)", "        pass",
        "tests/crash/test_dropped_pages.py::test_a_result_whose_fsync_failed_is_not_adopted_out_of_memory",
        "checkpoint.files: .*manifest.json cannot be read",
    ),
    Bug(
        "replays-any-log", "artd/store/origin.py",
        "    if foreign:\n", "    if False:\n",
        "tests/attack/test_disks.py::test_a_database_beside_a_log_that_is_not_its_own_is_refused", "DID NOT RAISE|malformed",
    ),
    Bug(
        "forgets-the-token-it-had", "artd/store/origin.py",
        "[row[0], new] if row else []", "[new]",
        "tests/attack/test_disks.py::test_a_death_at_any_moment_of_the_marking_refuses_nothing", "ForeignLog",
    ),
    Bug(
        "a-failed-backup-empties-its-folder", "artd/backups/backup.py",
        "        if path.name in MADE or path.name.startswith(MADE_WITH):\n", "        if True:\n",
        "tests/attack/test_folders.py::test_a_fresh_volume_is_an_empty_target", "No such file|assert",
    ),
    Bug(
        "lock-is-a-file-only", "artd/datadir/lock.py",
        "_flock(folder, fcntl.LOCK_EX, PATIENCE_S) and ", "",
        "tests/attack/test_folders.py::test_the_lock_cannot_be_deleted_away", "assert",
    ),
    Bug(
        "boot-forgets-running-jobs", "artd/recover.py",
        "        end_attempt(c, now, job, \"killed\", f\"{why} while it ran\")\n", "        pass\n",
        "tests/unit/test_recover.py::test_without_a_result_the_job_waits_again_and_costs_nothing",
        "'running' != 'queued'",
    ),
    Bug(
        "jobs-are-looked-for-row-by-row", "schema/artd_schema/sql/0001_initial.sql",
        "CREATE INDEX job_state ON job (state, run_id);", "CREATE INDEX job_state ON job (run_id, step);",
        "tests/unit/test_plans.py::test_no_service_reads_a_whole_table",
        "SCAN",
    ),
    Bug(
        "a-stop-waits-for-room-for-ever", "artd/store/writer.py",
        "refused += self.hurried.is_set()", "refused += 0",
        "tests/unit/test_disk.py::test_a_daemon_that_ends_gives_a_commit_without_room_three_more_tries",
        "AssertionError: it waits for ever",
    ),
    Bug(
        "named-copy-deleted", "artd/retention/code_copies.py",
        "                unused.pop(code.digest, None)\n", "                code.digest\n",
        "tests/unit/test_packages.py::test_copies_that_no_checkpoint_names_are_deleted_after_a_day", "assert ",
    ),
    Bug(
        "strange-folder-deleted-as-code", "artd/retention/code_copies.py",
        "CODE_COPY.fullmatch(path.name) is not None and ", "",
        "tests/unit/test_packages.py::test_copies_that_no_checkpoint_names_are_deleted_after_a_day", "assert ",
    ),
    Bug(
        "backup-without-code", "artd/backups/backup.py",
        "        _fetch_code(data, target, names, fetched)\n", "",
        "tests/process/test_backup.py::test_the_code_that_a_checkpoint_names_comes_along", "FileNotFoundError|assert ",
    ),
)  # fmt: skip
