"""Bugs of the daemon around the loop: processes, sockets, health, models."""

from __future__ import annotations

from .bug import Bug

BUGS = (
    Bug(
        "a-base-that-changed-is-used", "artd/models/base_model.py",
        "                if self._read(entry) != entry.sha256:\n", "                if not self._read(entry):\n",
        "tests/unit/test_base_model.py::test_a_changed_or_lost_file_is_a_conflict",
        "DID NOT RAISE",
    ),
    Bug(
        "the-writer-is-not-waited-for", "artd/health/heart.py",
        "if self._submit is None or self._seen != seen:", "if self._submit is None or self._asking or self._seen != seen:",
        "tests/unit/test_health.py::test_the_writer_lives_only_when_a_transaction_ended",
        "assert ",
    ),
    Bug(
        "sockets-are-gone-for-good", "artd/net/sockets.py",
        "        if not self._bound or not (", "        if not self._failed or not (",
        "tests/unit/test_health.py::test_a_runtime_folder_that_cannot_be_had_any_more_moves",
        "assert .False",
    ),
    Bug(
        "living-scratch-is-removed", "artd/supervise/scratch.py",
        "if path.name not in used]", "if path.name not in used or True]",
        "tests/attack/test_health.py::test_a_start_removes_what_the_dead_left_and_nothing_of_the_living",
        "Extra items in the right set",
    ),
    Bug(
        "ready-is-not-told", "artd/daemon.py",
        "        notify.say(\"READY=1\")\n", "        notify.say(\"READY=0\")\n",
        "tests/attack/test_restart.py::test_the_unit_starts_a_daemon_that_tells_its_manager",
        "READY=0",
    ),
    Bug(
        "a-stopped-daemon-counts-against-a-push", "artd/health/awake.py",
        "min(max(0.0, now - self._looked), self._most_s)", "max(0.0, now - self._looked)",
        "tests/unit/test_push.py::test_a_push_that_goes_on_has_time_and_so_has_one_of_a_daemon_that_was_stopped",
        "passed its deadline without progress",
    ),
    Bug(
        "a-hangup-is-the-end", "artd/daemon.py",
        "            ending.append(signal.SIGHUP)\n", "            ending.append(signal.SIGUSR2)\n",
        "tests/attack/test_health.py::test_a_sighup_drains_and_a_second_one_does_not_force",
        "assert -1 == 0",
    ),
    Bug(
        "no-watch-of-descriptors", "artd/net/descriptors.py",
        "if not watched.shut and self._used >= watched.high:", "if False:",
        "tests/attack/test_connections.py::test_more_local_connections_than_descriptors",
        "TimeoutError",
    ),
    Bug(
        "frames-not-summed", "artd/net/router.py",
        "            if size > self._max_message:\n", "            if size > self._max_message and len(frames) < 3:\n",
        "tests/unit/test_wire.py::test_the_frames_of_a_message_are_summed",
        "not enough values to unpack|Error",
    ),
    Bug(
        "a-full-daemon-reads-on", "artd/net/router.py",
        "if self._under_way is not None and self._under_way.full:", "if False:",
        "tests/unit/test_wire.py::test_nothing_is_read_while_too_much_is_under_way",
        "assert not",
    ),
    Bug(
        "no-descriptor-ends-a-service", "artd/services.py",
        "            if not is_scarce(error):\n", "            if True:\n",
        "tests/unit/test_scarce.py::test_a_service_that_lacks_descriptors_is_tried_again",
        "OSError: .*too many open files",
    ),
    Bug(
        "credentials-reach-children", "artd/supervise/environment.py",
        "not _is(key, drop)", "True",
        "tests/process/test_launch.py::test_credentials_do_not_reach_a_child_unless_told",
        "assert",
    ),
    Bug(
        "one-failed-look-up-ends-all", "artd/net/remote.py",
        "            except Exception:\n                log.exception(\"refused a client",
        "            except LookupError:\n                log.exception(\"refused a client",
        "tests/unit/test_remote.py::test_a_question_that_cannot_be_answered_is_not_the_last",
        "ValueError: a surprise in pyzmq|assert",
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
        "any-key-may-connect", "artd/net/keys.py",
        "                if _load(path)[0] == public:\n", "                if _load(path)[0]:\n",
        "tests/daemon/test_security.py::test_a_client_of_another_machine",
        "DID NOT RAISE .*NotAllowed",
    ),
    Bug(
        "a-neighbours-copy-is-a-leftover", "artd/supervise/code.py",
        "        fcntl.flock(handle, fcntl.LOCK_EX)\n", "",
        "tests/process/test_launch.py::test_a_copy_that_another_process_makes_is_not_a_leftover",
        "assert 0 == 1",
    ),
    Bug(
        "a-damaged-model-is-taken", "artd/models/hub.py",
        "    if not file.is_whole(path):\n        path.unlink", "    if not path.is_file():\n        path.unlink",
        "tests/process/test_models.py::test_what_came_damaged_is_refused_and_comes_again_the_next_time",
        r"assert \(0 == 1\)",
    ),
    Bug(
        "a-skip-that-nobody-allowed", "tests/skips.py",
        'test.partition("[")[0] not in listed()', 'test.partition("[")[0] in ("",)',
        "tests/unit/test_skips.py::test_a_skip_outside_the_list_is_red", "assert",
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
        "one-malformed-package-hides-all", "artd/supervise/packages.py",
        "        except Exception as error:  # another package's metadata\n", "        except KeyError as error:\n",
        "tests/unit/test_packages.py::test_another_package_with_malformed_metadata_stops_no_start", "Pair.*missing",
    ),
    Bug(
        "one-bad-engine-pauses-the-run", "artd/serving/push_ends.py",
        'or not counted or _has_other(c, run, row["engine"]):', "or not counted:",
        "tests/unit/test_fleet.py::test_an_engine_whose_pushes_fail_does_not_pause_a_run_that_another_one_serves",
        "'paused' == 'active'",
    ),
    Bug(
        "a-bad-engine-is-tried-for-ever", "artd/core/fleet.py",
        "    return engine.serves or (engine.failures < most and not engine.broken)\n", "    return True\n",
        "tests/unit/test_fleet.py::test_a_run_is_paused_when_no_engine_may_serve_it", "'active' == 'paused'",
    ),
    Bug(
        "all-means-the-first", "artd/runs/progress.py",
        '    if engines == "first":\n', "    if engines:\n",
        "tests/unit/test_fleet.py::test_a_wait_ends_with_the_first_engine_or_with_all", r"\(True, True\) == \(True, False\)",
    ),
    Bug(
        "a-lagging-engine-holds-up-training", "artd/serving/pusher.py",
        "            self._hurry_others(sending)\n", "            pass\n",
        "tests/unit/test_fleet.py::test_an_engine_that_lags_behind_another_one_is_not_waited_for_long", "assert .* == ",
    ),
)  # fmt: skip
