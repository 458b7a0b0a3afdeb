"""The same job under each peer: `python queues.py SYSTEM put|work|left|rate FOLDER`. Runs in the peers' own environment (no artd there).

A job notes its start and, a quarter of a second later, its end in FOLDER/log. Each peer is used as its own documentation says
and at its most durable: fsync where it can be asked for, acknowledgement after the work where there is one, jobs taken back at
a worker's start where it offers that. One worker, one job at a time. `left` prints how many jobs the peer still
knows as not done; `rate` (the three that are a file) prints how many payloads of 512 bytes it keeps durably in RATE_S.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

JOBS = 20
WORK_S = 0.25
RATE_S = 3.0
PAYLOAD = "x" * 512


def job(folder: str, number: int) -> None:
    note(folder, f"start {number}")
    time.sleep(WORK_S)
    note(folder, f"end {number}")


async def async_job(folder: str, number: int) -> None:
    note(folder, f"start {number}")
    await asyncio.sleep(WORK_S)
    note(folder, f"end {number}")


def rate(put: Callable[[int], object]) -> None:
    number, end = 0, time.monotonic() + RATE_S
    while time.monotonic() < end:
        put(number)
        number += 1
    print(number)


def note(folder: str, text: str) -> None:
    with open(Path(folder) / "log", "a") as file:
        file.write(text + "\n")


def huey(folder: str, what: str) -> None:
    from huey import SqliteHuey
    from huey.consumer import Consumer

    queue = SqliteHuey(filename=f"{folder}/huey.db", fsync=True)
    task = queue.task(retries=3)(job)
    if what == "put":
        for number in range(JOBS):
            task(folder, number)
    elif what == "left":
        print(queue.pending_count())
    elif what == "rate":
        rate(lambda number: task(PAYLOAD, number))
    else:
        Consumer(queue, workers=1, periodic=False, max_delay=0.2).run()


def persist_queue(folder: str, what: str) -> None:
    from persistqueue import SQLiteAckQueue

    queue = SQLiteAckQueue(f"{folder}/persist", auto_resume=True)
    if what == "put":
        for number in range(JOBS):
            queue.put(number)
        return
    if what == "left":
        print(queue.unack_count() + queue.size)
        return
    if what == "rate":
        rate(lambda number: queue.put(PAYLOAD))
        return
    while True:
        number = queue.get()
        job(folder, number)
        queue.ack(number)


def litequeue(folder: str, what: str) -> None:
    from litequeue import LiteQueue

    queue = LiteQueue(f"{folder}/lite.db")
    queue.conn.execute("PRAGMA synchronous = FULL")
    if what == "rate":
        rate(lambda number: queue.put(PAYLOAD))
        return
    if what == "put":
        for number in range(JOBS):
            queue.put(str(number))
        return
    if what == "left":
        print(queue.qsize())
        return
    for left in queue.list_locked(threshold_seconds=0):
        queue.retry(left.message_id)
    while True:
        message = queue.pop()
        if message is None:
            time.sleep(0.1)
            continue
        job(folder, int(message.data))
        queue.done(message.message_id)


def saq(folder: str, what: str) -> None:
    from saq import Queue, Worker

    queue = Queue.from_url(f"redis://127.0.0.1:{os.environ['REDIS_PORT']}")

    async def work(_context: dict, *, number: int) -> None:
        await async_job(folder, number)

    async def put() -> None:
        await queue.connect()
        for number in range(JOBS):
            await queue.enqueue("work", number=number, retries=5, heartbeat=2, timeout=10)
        await queue.disconnect()

    async def left() -> None:
        await queue.connect()
        print(await queue.count("incomplete"))
        await queue.disconnect()

    if what != "work":
        asyncio.run(put() if what == "put" else left())
    else:
        asyncio.run(Worker(queue, functions=[("work", work)], concurrency=1, timers={"sweep": 1}).start())


def procrastinate(folder: str, what: str) -> None:
    from procrastinate import App, PsycopgConnector, RetryStrategy

    app = App(connector=PsycopgConnector(conninfo=os.environ["PG_DSN"]))

    @app.task(name="work", retry=RetryStrategy(max_attempts=5))
    async def work(number: int) -> None:
        await async_job(folder, number)

    async def put() -> None:
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            for number in range(JOBS):
                await work.defer_async(number=number)

    async def serve() -> None:
        async with app.open_async():
            for left in await app.job_manager.get_stalled_jobs():  # their documentation's way, at a worker's start
                await app.job_manager.retry_job(left)
            await app.run_worker_async(concurrency=1)

    async def left() -> None:
        async with app.open_async():
            print(sum(job.status in ("todo", "doing") for job in await app.job_manager.list_jobs_async()))

    asyncio.run({"put": put, "work": serve, "left": left}[what]())


def dbos(folder: str, what: str) -> None:
    from dbos import DBOS, SetWorkflowID

    DBOS(
        config={
            "name": "survival",
            "system_database_url": f"sqlite:///{folder}/dbos.sqlite",
            "application_version": "1",
        }
    )

    @DBOS.step()
    def step(number: int) -> None:
        job(folder, number)

    @DBOS.workflow()
    def work(number: int) -> None:
        step(number)

    if what != "work":
        DBOS.listen_queues([])
    DBOS.launch()
    DBOS.register_queue("work", global_concurrency=1, polling_interval_sec=0.1)
    if what == "put":
        for number in range(JOBS):
            with SetWorkflowID(f"job-{number}"):
                DBOS.enqueue_workflow("work", work, number)
        DBOS.destroy()
        return
    if what == "left":
        print(len(DBOS.list_workflows(status=["PENDING", "ENQUEUED"])))
        DBOS.destroy()
        return
    while True:
        time.sleep(1)


SYSTEMS: dict[str, Callable[[str, str], None]] = {
    "huey": huey, "persist-queue": persist_queue, "litequeue": litequeue, "saq": saq, "procrastinate": procrastinate, "dbos": dbos,
}  # fmt: skip

if __name__ == "__main__":
    system, action, place = sys.argv[1:]
    SYSTEMS[system](place, action)
