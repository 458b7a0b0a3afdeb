"""The engine worker as a process, under a fake daemon and with a scripted server: pushes, faults, death and end."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from artd_schema import crashpoint
from artd_schema.data.trajectory import RouteShape
from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.http import call
from artd_workers.engines.process.server import TERM_S
from artd_workers.engines.vllm import guard
from tests.awake import SOON_S, Awake, wait_until
from tests.engine.conftest import Bench
from tests.fake_daemon import INSTANCE, SPAWN, WorkerDaemon

RUNNING = 'vllm:num_requests_running{engine="0"} 1.0'
MERGED_CALLS = [
    "artd_begin",
    "artd_load_merged",
    "artd_finish",
    "/update_weight_version",
    "artd_label",
    "/reset_prefix_cache",
    "/resume",
]


def request(socket: str, seconds: float, model: str = "toy") -> tuple[threading.Thread, list[str]]:
    """A request in flight at the fake server; the list gets why it ended."""
    ended: list[str] = []

    def run() -> None:
        body = {"model": model, "prompt": [[1, 2]], "max_tokens": int(seconds * 100)}
        try:
            answer = call(socket, "POST", "/v1/completions", body, deadline=Deadline(seconds + SOON_S))
            ended.append(answer["choices"][0]["finish_reason"])
        except EngineError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: ended or RUNNING in call(socket, "GET", "/metrics", deadline=Deadline(SOON_S)))
    assert not ended, f"a request of {seconds} s is too short: {ended}"
    return thread, ended


def gone(bench: Bench) -> None:
    """Nothing of the server is left: no process, no socket, no scratch file. Its log stays."""
    wait_until(lambda: not bench.processes())
    assert not Path(bench.config.dir).exists()
    assert not bench.shm.exists()
    assert Path(bench.config.log).exists()


def live(daemon: WorkerDaemon, push: w.Push) -> w.Live:
    daemon.send(push)
    return daemon.expect(w.Live, where=lambda message: message.fence == push.fence)


PUSHED = ["engine.fenced", "engine.pausing", "engine.paused", "engine.updated", "engine.resumed", "engine.verified"]


def test_merged_push_goes_through_the_phases_in_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(crashpoint.VARIABLE, str(bench.root))
    with bench.start() as daemon:
        daemon.ready()
        first = live(daemon, bench.push(0))
        live(daemon, bench.push(1))
        daemon.send(w.Exit(grace_s=5))
        assert daemon.wait() == 0
    assert set(first.seconds) == {"hold", "pause", "transfer", "load", "resume", "verify"}
    assert first.max_abs == 0.0
    routes = bench.routes()
    one = ["/pause", *MERGED_CALLS, "/v1/completions"]
    assert routes == ["/version", *one, *one, "/abort_requests"]
    versions = [call["body"]["new_version"] for call in bench.calls() if call["route"] == "/update_weight_version"]
    assert versions == ["toy@0", "toy@1"]
    assert crashpoint.list_reached(bench.root) == ["engine.started", *PUSHED, *PUSHED]
    gone(bench)


def test_server_is_started_as_the_design_says(bench: Bench) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with bench.start() as daemon:
        socket = daemon.ready()
        assert Path(socket).parent.stat().st_mode & 0o777 == 0o700
    server = bench.server()
    options, env = server["argv"], server["env"]
    for flag in ("--enforce-eager", "--no-enable-chunked-prefill", "--enable-scale-out"):
        assert flag in options
    value = dict(zip(options, options[1:], strict=False))
    assert int(value["--max-num-batched-tokens"]) >= 64
    assert value["--generation-config"] == "vllm"
    assert value["--logprobs-mode"] == "processed_logprobs"
    assert value["--weight-transfer-config"] == '{"backend": "artd_gloo"}'
    assert value["--served-model-name"] == "toy"
    assert not {"--no-enable-prefix-caching", "--enable-return-routed-experts"} & set(options)
    assert "OMP_NUM_THREADS" not in env
    assert env["TMPDIR"].startswith(bench.config.dir)
    assert env["VLLM_SERVER_DEV_MODE"] == env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"


def test_routes_are_captured_before_anything_is_served(bench: Bench) -> None:
    bench.shape = RouteShape(layers=3, topk=2, experts=8)
    with bench.start() as daemon:
        daemon.ready()
        assert bench.routes() == ["/version", "artd_capture_routes"]
    (call,) = [call for call in bench.calls() if call["route"] == "artd_capture_routes"]
    assert call["body"]["kwargs"] == {"layers": 3, "topk": 2, "experts": 8}
    assert "--no-enable-prefix-caching" in bench.server()["argv"]


def test_an_engine_that_cannot_capture_does_not_get_ready(bench: Bench) -> None:
    bench.shape = RouteShape(layers=3, topk=2, experts=8)
    bench.script = {"faults": {"artd_capture_routes": 500}}
    with bench.start() as daemon:
        assert "scripted failure of artd_capture_routes" in daemon.expect(w.Down).error
        assert daemon.wait() == 1
    assert not any(isinstance(message, w.Ready) for message in daemon.received)
    gone(bench)


def test_an_engine_of_another_version_than_its_package_is_refused(bench: Bench) -> None:
    """It was started with the flags of one, and tells routes as the other does."""
    bench.shape = RouteShape(layers=3, topk=2, experts=8)
    bench.script = {"version": "0.25.1"}
    with bench.start() as daemon:
        assert "tells routes by field" in daemon.expect(w.Down).error


def test_requests_in_flight_end_before_the_pause_or_are_aborted(bench: Bench) -> None:
    with bench.start() as daemon:
        socket = daemon.ready()
        thread, ended = request(socket, 1.0)
        live(daemon, bench.push(0, drain_s=SOON_S))
        thread.join()
        assert ended == ["length"]
        thread, ended = request(socket, 2 * SOON_S)
        done = live(daemon, bench.push(1, drain_s=0.5))
        assert done.seconds["pause"] >= 0.5
        thread.join()
        assert ended == ["abort"]


def test_an_older_fence_is_refused_and_changes_nothing(bench: Bench) -> None:
    old, new = bench.push(0), bench.push(1)
    with bench.start() as daemon:
        daemon.ready()
        live(daemon, new)
        before = bench.routes()
        daemon.send(old)
        assert daemon.expect(w.Refused).fence == old.fence
        daemon.send(new)
        assert daemon.expect(w.Refused).fence == new.fence
        assert bench.routes() == before
        live(daemon, bench.push(2))


def waits(daemon: WorkerDaemon, bench: Bench, route: str) -> None:
    """The push under way has come to this call."""
    daemon.expect(w.Pausing)
    wait_until(lambda: route in bench.routes())


def asked(daemon: WorkerDaemon, push: w.Push) -> None:
    """The push is sent, and waits for the gateway's hold."""
    daemon.holds = False
    daemon.send(push)
    assert daemon.expect(w.Pausing) == w.Pausing(push=push.push, fence=push.fence)


def test_an_engine_is_paused_only_after_the_daemon_said_so(bench: Bench) -> None:
    with bench.start() as daemon:
        socket = daemon.ready()
        push = bench.push(0)
        asked(daemon, push)
        thread, ended = request(socket, 1.0)
        thread.join()
        assert ended == ["length"], "requests go on meanwhile"
        for other in ({"fence": push.fence - 1}, {"fence": push.fence + 1}, {"push": push.push + 1}):
            daemon.send(w.Proceed(**{"push": push.push, "fence": push.fence} | other))
        daemon.hear(0.5)
        assert bench.routes() == ["/version", "/v1/completions"]
        daemon.send(w.Proceed(push=push.push, fence=push.fence))
        assert daemon.expect(w.Live).seconds["hold"] >= 0.5
        daemon.send(w.Proceed(push=push.push, fence=push.fence))  # twice: it must not count for the next
        asked(daemon, bench.push(1))
        daemon.hear(0.3)
        assert bench.routes().count("/pause") == 1


def test_a_push_that_is_not_told_to_go_on_ends_at_its_deadline(bench: Bench) -> None:
    with bench.start() as daemon:
        daemon.ready()
        asked(daemon, bench.push(0, deadline_s=0.5))
        failed = daemon.expect(w.PushFailed)
        assert (failed.fence, failed.phase) == (1, "hold") and "gateway" in failed.error
        assert daemon.wait() == 1
    assert bench.routes() == ["/version"]
    gone(bench)


def test_an_engine_that_dies_while_it_waits_is_told_at_once(bench: Bench) -> None:
    with bench.start() as daemon:
        daemon.ready()
        asked(daemon, bench.push(0, deadline_s=2 * SOON_S))
        os.kill(int(Path(bench.config.log).read_text().split()[2]), signal.SIGKILL)
        failed = daemon.expect(w.PushFailed)
        assert (failed.phase, failed.fence) == ("hold", 1)
        assert "signal 9" in daemon.expect(w.Down).error
        assert daemon.wait() == 1
    gone(bench)


def test_exit_while_a_push_waits_for_the_hold(bench: Bench) -> None:
    with bench.start() as daemon:
        daemon.ready()
        asked(daemon, bench.push(0, deadline_s=2 * SOON_S))
        daemon.send(w.Exit(grace_s=1.0))
        assert daemon.wait() == 0
    gone(bench)


def test_a_newer_push_ends_one_that_waits_for_its_trainer(bench: Bench) -> None:
    bench.script = {"faults": {"/init_weight_transfer_engine": "hang"}}
    with bench.start() as daemon:
        daemon.ready()
        daemon.send(bench.push(0, source="live", rendezvous="r", deadline_s=2 * SOON_S))
        waits(daemon, bench, "/init_weight_transfer_engine")
        daemon.send(bench.push(0))
        assert daemon.expect(w.PushFailed).fence == 1
        assert "replaced" in daemon.expect(w.Down).error
        daemon.wait()


def test_lora_push_loads_under_its_name_and_unloads_after_the_last_request(bench: Bench) -> None:
    bench.mode = "lora"
    with bench.start() as daemon:
        socket = daemon.ready()
        done = live(daemon, bench.push(1))
        assert set(done.seconds) == {"transfer", "load", "verify"}
        adapters = Path(bench.config.dir) / "adapters"
        thread, _ = request(socket, 2 * SOON_S, model="toy@1")
        live(daemon, bench.push(2))
        assert not [message for message in daemon.received if isinstance(message, w.Pausing)]
        daemon.send(w.Unload(name="toy@1"))
        time.sleep(1.0)  # it is looked at every half second
        assert "/v1/unload_lora_adapter" not in bench.routes()
        assert len(list(adapters.iterdir())) == 2
        headers = {guard.HEADER: guard.owner(INSTANCE, SPAWN)}
        call(socket, "POST", "/abort_requests", {}, deadline=Deadline(SOON_S), headers=headers)
        thread.join()
        wait_until(lambda: bench.routes()[-1] == "/v1/unload_lora_adapter")
        wait_until(lambda: [left.name for left in adapters.iterdir()] == ["2-2"])
    loads = [call["body"] for call in bench.calls() if call["route"] == "/v1/load_lora_adapter"]
    assert [body["lora_name"] for body in loads] == ["toy@1", "toy@2"]
    assert all("load_inplace" not in body for body in loads)
    assert not {"/pause", "/resume"} & set(bench.routes())
    server = bench.server()["argv"]
    assert "--enable-lora" in server
    assert server[server.index("--served-model-name") + 1] == "toy@base"


def test_death_of_the_server_is_noticed_and_told(bench: Bench) -> None:
    with bench.start() as daemon:
        daemon.ready()
        pid = int(Path(bench.config.log).read_text().split()[2])
        os.kill(pid, signal.SIGKILL)
        down = daemon.expect(w.Down)
        assert "signal 9" in down.error
        assert "fake server" in down.tail
        assert daemon.wait() == 1
    gone(bench)


STARTS = {
    "OSError: [Errno 28] No space left on device": "disk is full",
    "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes": "out of memory",
    "ValueError: something else": "ended with exit code 1 (first error in its log: ValueError: something else)",
}


@pytest.mark.parametrize(("line", "said"), STARTS.items(), ids=["disk", "memory", "other"])
def test_a_server_that_dies_at_start_is_explained(bench: Bench, line: str, said: str) -> None:
    bench.script = {"start": line}
    Path(bench.root / "engine.log").write_text("MemoryError: of an earlier spawn\n")
    with bench.start() as daemon:
        down = daemon.expect(w.Down)
        assert said in down.error
        assert down.tail.splitlines()[-1] == line
        assert len(down.tail.splitlines()) == 40
        assert daemon.wait() == 1
    gone(bench)


def test_an_interpreter_that_is_not_there_is_named(bench: Bench) -> None:
    bench.python = str(bench.root / "nowhere")
    with bench.start() as daemon:
        down = daemon.expect(w.Down)
    assert bench.python in down.error + down.tail


def test_a_gpu_that_is_not_there_is_told_before_a_server_is_started(bench: Bench) -> None:
    bench.engine, bench.gpus = {"device": "cuda"}, 0
    Path(bench.root / "engine.log").write_text("MemoryError: of an earlier spawn\n")
    with bench.start() as daemon:
        down = daemon.expect(w.Down)
        assert daemon.wait() == 1
    assert down.error.startswith("engine.device is cuda, and no GPU can be used on ")
    assert "no CUDA-capable device is detected (100)" in down.error
    assert "MemoryError" not in down.error and not down.tail
    assert not (bench.root / "calls.env").exists(), "no server was started"
    gone(bench)


def test_exit_with_a_hanging_request_keeps_the_deadline(bench: Bench) -> None:
    bench.script = {"term": "hang"}
    with bench.start() as daemon:
        thread, ended = request(daemon.ready(), 2 * SOON_S)
        with Awake() as took:
            daemon.send(w.Exit(grace_s=1.0))
            assert daemon.wait() == 0
        assert took.seconds < TERM_S
        thread.join()
    assert ended == ["abort"]
    gone(bench)


def test_exit_without_grace_kills_at_once(bench: Bench) -> None:
    bench.script = {"term": "hang"}
    with bench.start() as daemon:
        daemon.ready()
        with Awake() as took:
            daemon.send(w.Exit(grace_s=0.0))
            assert daemon.wait() == 0
        assert took.seconds < TERM_S
    assert "/abort_requests" not in bench.routes()
    gone(bench)


def test_exit_during_a_push_does_not_wait_for_it(bench: Bench) -> None:
    bench.script = {"faults": {"artd_load_merged": "hang"}}
    with bench.start() as daemon:
        daemon.ready()
        daemon.send(bench.push(0, deadline_s=2 * SOON_S))
        waits(daemon, bench, "artd_load_merged")
        daemon.send(w.Exit(grace_s=1.0))
        assert daemon.wait() == 0
    gone(bench)


def test_server_dies_with_a_killed_harness(bench: Bench) -> None:
    with bench.start() as daemon:
        daemon.ready()
        pid = int(Path(bench.config.log).read_text().split()[2])
        assert pid in bench.processes()
        daemon.process.kill()
        wait_until(lambda: pid not in bench.processes())
        for other in bench.processes():
            os.kill(other, signal.SIGKILL)
    assert bench.shm.exists()
    shutil.rmtree(bench.config.dir)
    first, bench.script = bench.shm, {"shm": "/dev/shm/psm_artd_test_second" + bench.root.name}
    with bench.start() as daemon:
        daemon.ready()
        assert not first.exists(), "the next spawn removes what the killed one left"
        daemon.send(w.Exit(grace_s=5))
        assert daemon.wait() == 0
    assert not Path(bench.script["shm"]).exists()
    assert not list(bench.root.glob("*.scratch"))


def test_a_folder_too_long_for_sockets_is_refused(bench: Bench) -> None:
    bench.folder = "e" * 60
    with bench.start() as daemon:
        down = daemon.expect(w.Down)
    assert "shorter runtime folder" in down.error
    assert not Path(bench.config.log).exists()


def test_a_folder_that_others_can_enter_is_refused(bench: Bench) -> None:
    (bench.root / "e").mkdir()
    (bench.root / "e").chmod(0o755)
    with bench.start() as daemon:
        assert "0700" in daemon.expect(w.Down).error
