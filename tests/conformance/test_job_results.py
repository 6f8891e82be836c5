"""One suite for results of jobs: over all transports, for threads and for asyncio."""

import asyncio
import gc
import secrets
import threading
from typing import Any

import pytest
from tests.conformance.stage import Run, running, threaded

import headrace
from headrace import errors
from headrace.model.job_requests import REPLY_HEADER, RESULTS_TOPIC

SOON_S = 30

RETURNED: dict[bytes, Any] = {
    b"bytes": b"\x00\xff",
    b"text": "grün",
    b"json": {"width": 640, "tags": ["a", None, 1.5]},
    b"none": None,
    b"list": [1, 2],
}


def worker(topic: str, **options: Any) -> Any:
    def prepare(app: Any) -> None:
        @app.on(topic, **options)
        def handle(job: Any) -> Any:
            if job.value == b"wrong":
                raise LookupError("where is it?")
            if job.value == b"refused":
                raise headrace.Reject("not for us")
            if job.value == b"later" and job.deliveries < 3:
                raise headrace.Retry(0.01)
            return RETURNED.get(job.value, job.deliveries)

    return prepare


def test_whoever_published_gets_what_the_handler_returned(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        handles = {value: await bus.publish(topic, value, reply=True) for value in RETURNED}
        assert not await handles[b"text"].done()
        async with running(bus, worker(topic, concurrency=3)):
            for value, handle in handles.items():
                assert await handle.result(timeout=SOON_S) == RETURNED[value]
                assert await handle.result() == RETURNED[value], "and again"
                assert await handle.done()
                assert handle.receipt.topic == topic
        assert len({handle.id for handle in handles.values()}) == len(handles)
        info = await bus.queue(topic).stats()
        assert (info.acked, info.ready, info.leased) == (len(handles), 0, 0)

    run(story)


def test_a_result_is_found_again_by_the_id_of_the_job(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        handles = [await bus.publish(topic, b"json", reply=True) for _ in range(20)]
        ids = [handle.id for handle in handles]
        del handles
        gc.collect()
        async with running(bus, worker(topic)):
            for id in ids:
                assert await bus.job_result(id).result(timeout=SOON_S) == RETURNED[b"json"]
        assert await bus.job_result(ids[0]).done()
        assert bus.job_result(ids[0]).receipt is None

    run(story)


def test_attempts_that_are_followed_by_another_are_no_result(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        handle = await bus.publish(topic, b"later", reply=True)
        async with running(bus, worker(topic)):
            assert await handle.result(timeout=SOON_S) == 3

    run(story)


@pytest.mark.parametrize("rejected", ["dead", "drop"])
def test_a_job_that_failed_for_good_raises_with_the_error_object(run: Run, topic: str, rejected: str) -> None:
    async def story(bus: Any) -> None:
        wrong = await bus.publish(topic, b"wrong", reply=True)
        refused = await bus.publish(topic, b"refused", reply=True)
        retry = {"deliveries_max": 2, "retry_seconds": 0.01, "rejected": rejected}
        async with running(bus, worker(topic, retry=retry)) as at_work:
            with pytest.raises(errors.JobFailed, match="LookupError: where is it") as raised:
                await wrong.result(timeout=SOON_S)
            assert raised.value.error_code == "deliveries_exhausted"
            assert not raised.value.retryable
            assert raised.value.error_details == {
                "topic": topic,
                "partition": 0,
                "offset": 0,
                "subscription": "default",
                "deliveries": 2,
            }
            assert "Traceback" not in str(raised.value)
            with pytest.raises(errors.JobFailed, match="not for us") as raised:
                await refused.result(timeout=SOON_S)
            assert raised.value.error_code == "job_rejected"
            assert await refused.done()
            expected = 1 if rejected == "drop" else 2

            async def all_dead() -> bool:
                return (await bus.queue(topic).stats()).dead == expected

            await at_work.until(all_dead)
        dead = {message.value for message in await bus.queue(topic).find(status="dead")}
        assert dead == {b"wrong", b"refused"} - ({b"refused"} if rejected == "drop" else set())

    run(story)


def test_a_job_that_is_put_back_is_not_answered_a_second_time(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        handle = await bus.publish(topic, b"refused", reply=True)
        async with running(bus, worker(topic)) as at_work:
            with pytest.raises(errors.JobFailed):
                await handle.result(timeout=SOON_S)
            queue = bus.queue(topic)

            async def is_dead() -> bool:
                return (await queue.stats()).dead == 1

            await at_work.until(is_dead)
            (dead,) = await queue.find(status="dead")
            assert REPLY_HEADER not in dead.headers
            before = await bus.offsets(RESULTS_TOPIC)
            await queue.redrive()
            await at_work.until(is_dead)
        assert await bus.offsets(RESULTS_TOPIC) == before

    run(story)


def test_a_job_that_expires_unhandled_is_answered(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_subscription(topic)
        soon = bus.clock.now_us() + 50_000
        handle = await bus.publish(topic, b"text", expires=soon, reply=True)
        with pytest.raises(errors.JobFailed) as raised:
            await handle.result(timeout=SOON_S)
        assert raised.value.error_code == "message_expired"

    run(story)


class Unknown:
    pass


@pytest.mark.parametrize(
    ("returned", "code"), [(Unknown(), "cannot_serialize"), (b"x" * (2 << 20), "message_too_large")]
)
def test_what_cannot_be_stored_is_told(run: Run, topic: str, returned: Any, code: str) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: Any) -> None:
            app.on(topic)(lambda _job: returned)

        handle = await bus.publish(topic, b"text", reply=True)
        async with running(bus, prepare):
            with pytest.raises(errors.JobFailed) as raised:
                await handle.result(timeout=SOON_S)
        assert raised.value.error_code == code
        assert (await bus.queue(topic).stats()).acked == 1, "its work is done"

    run(story)


def test_nobody_is_answered_who_does_not_ask(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        before = await bus.offsets(RESULTS_TOPIC) if await bus.topics(RESULTS_TOPIC) else None
        strange = {REPLY_HEADER: "no job's id"}
        await bus.create_subscription(topic)
        await bus.publish(topic, b"text", headers=strange)
        receipt = await bus.publish(topic, b"text", reply=False)
        assert receipt.offset == 1
        async with running(bus, worker(topic)) as at_work:

            async def acked() -> bool:
                return (await bus.queue(topic).stats()).acked == 2

            await at_work.until(acked)
        assert before == (await bus.offsets(RESULTS_TOPIC) if await bus.topics(RESULTS_TOPIC) else None)

    run(story)


def test_a_partition_that_is_not_there_stands_for_another(run: Run, topic: str) -> None:
    """As when the results topic was created again with fewer partitions: its number modulo theirs."""

    async def story(bus: Any) -> None:
        await bus.publish(topic, b"text", reply=True)  # which creates the results topic
        id = f"99-0-{secrets.token_urlsafe(16)}"
        assert not await bus.job_result(id).done()
        await bus.publish(topic, b"json", headers={REPLY_HEADER: id})
        async with running(bus, worker(topic)):
            assert await bus.job_result(id).result(timeout=SOON_S) == RETURNED[b"json"]
        assert await bus.job_result(id).done()

    run(story)


def test_waiting_ends_in_time_and_can_be_repeated(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        handle = await bus.publish(topic, b"text", headers={"a": "b"}, reply=True)
        with pytest.raises(errors.Timeout, match=handle.id):
            await handle.result(timeout=0.01)
        async with running(bus, worker(topic)):
            assert await handle.result(timeout=SOON_S) == "grün"
        with pytest.raises(errors.InvalidArgument, match="no job's id"):
            bus.job_result("jobs/0/17")

    run(story)


def test_many_wait_at_once(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        handles = [await bus.publish(topic, b"text", reply=True) for _ in range(20)]
        async with running(bus, worker(topic, concurrency=4)):
            if threaded(bus):
                waiting = [asyncio.to_thread(handle.inner.result, SOON_S) for handle in handles]
            else:
                waiting = [handle.result(SOON_S) for handle in handles]
            assert await asyncio.gather(*waiting) == ["grün"] * 20

    run(story)


def test_closing_the_bus_ends_waiting(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        handle = await bus.publish(topic, b"text", reply=True)
        call = asyncio.to_thread(handle.inner.result) if threaded(bus) else handle.result()
        waiting = asyncio.ensure_future(call)
        await asyncio.sleep(0.05)
        await bus.close()
        with pytest.raises((errors.Closed, errors.ConnectionFailed)):
            await waiting

    run(story)


# Tasks.


def test_tasks_are_called_by_name_with_arguments(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        tasks: dict[str, Any] = {}

        def prepare(app: Any) -> None:
            @app.task(topic, concurrency=2)
            def add(one: int, other: int = 10) -> int:
                return one + other

            @app.task(topic, name="later-name")
            async def shout(text: str) -> str:
                return text.upper()

            assert add(1, 2) == 3, "called here, it is the function"
            with pytest.raises(errors.InvalidArgument, match="there is a task add"):
                app.task(topic, name="add")(len)
            tasks.update(add=add, shout=shout)

        async with running(bus, prepare):
            calls = [("add", (1,), {"other": 2}), ("add", (1,), {}), ("shout", ("plum",), {})]
            results = []
            for name, args, kwargs in calls:
                called = tasks[name].delay(*args, **kwargs)
                handle = await called if not threaded(bus) else called
                waited = handle.result(timeout=SOON_S)
                results.append(await waited if not threaded(bus) else waited)
            assert results == [3, 11, "PLUM"]
            with pytest.raises(errors.HeadraceError, match="JSON cannot hold the arguments of the task add"):
                await tasks["add"].delay(object())
            wrong = {b"not json": "calls no task", b'{"task": "unknown"}': "no task 'unknown' here"}
            for value, text in wrong.items():
                handle = await bus.publish(topic, value, reply=True)
                with pytest.raises(errors.JobFailed, match=text):
                    await handle.result(timeout=SOON_S)

    run(story)


def test_an_app_with_an_address_calls_tasks_over_a_connection_of_its_own(served: dict[str, str], topic: str) -> None:
    app = headrace.App(served["tcp"])
    double = app.task(topic, name="double")(lambda number: 2 * number)
    handle = double.send([21], key="k", headers={"a": "b"})
    thread = threading.Thread(target=app.run, kwargs={"stop_on_signals": False})
    thread.start()
    assert handle.result(timeout=SOON_S) == 42
    app.stop()
    thread.join()
    app.close()


def test_tenants_have_results_of_their_own(served: dict[str, str], topic: str) -> None:
    with headrace.connect(served["tcp"], tenant="acme") as acme, headrace.connect(served["tcp"]) as other:
        app = headrace.App(acme)
        app.on(topic, retry={"deliveries_max": 1})(lambda job: 1 // int(job.value))
        good, bad = acme.publish(topic, b"1", reply=True), acme.publish(topic, b"0", reply=True)
        thread = threading.Thread(target=app.run, kwargs={"stop_on_signals": False})
        thread.start()
        assert good.result(timeout=SOON_S) == 1
        with pytest.raises(errors.JobFailed, match="ZeroDivisionError") as raised:
            bad.result(timeout=SOON_S)
        assert raised.value.error_details["topic"] == topic, "without the tenant"
        app.stop()
        thread.join()
        other.publish(topic, b"1", reply=True)  # so that it has a results topic
        assert not other.job_result(good.id).done()
        assert acme.job_result(good.id).done()
