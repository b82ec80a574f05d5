"""Commands call the first coordinator that can be reached, and wait for the result of changes."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

import grpc
import pytest
import typer
from google.protobuf.timestamp_pb2 import Timestamp

from baton.cli import cache, exit_codes, pool_sizes, rollout, watch
from baton.cli.admin_calls import call_admin
from baton.cli.listings import workers
from baton.client import AdminClient, errors
from baton.runtime.errors import Aborted, DeadlineExceeded, FailedPrecondition
from baton.runtime.network import rpc
from baton.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from tests.security.tcp_relay import Relay

WAIT_S = 120.0

# Timeout in seconds that only bounds a test that hangs.
HANG_S = 120.0


class OneAnswer(admin_pb2_grpc.AdminServicer):
    """A coordinator that answers a number of calls and then fails every call."""

    def __init__(self, answers: int) -> None:
        self.answers, self.asked = answers, 0

    async def ListPools(self, request, context):
        self.asked += 1
        if self.asked > self.answers:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has ended")
        return admin_pb2.ListPoolsResponse(generation=self.asked)


class Sized(admin_pb2_grpc.AdminServicer):
    """A coordinator that records the requested pool sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def ScalePool(self, request, context):
        self.sizes.append(request.workers)
        return admin_pb2.ScalePoolResponse(message="scaled")


class Rolling(admin_pb2_grpc.AdminServicer):
    """A coordinator whose Watch sends these rollout states; None: it is too old to send them."""

    def __init__(self, *told: admin_pb2.RolloutStatus | None) -> None:
        self.told, self.num_promotions = told, 0

    async def Watch(self, request, context):
        for one in self.told:
            yield admin_pb2.WatchEvent(rollout=one)
        await asyncio.Event().wait()

    async def StartRollout(self, request, context):
        return admin_pb2.StartRolloutResponse(message="it is being tried")

    async def PromoteRollout(self, request, context):
        self.num_promotions += 1
        return admin_pb2.PromoteRolloutResponse(message="it is being promoted")


class Peers(admin_pb2_grpc.AdminServicer):
    """A coordinator with one worker, whose peers are an attached worker and a detached one."""

    async def ListWorkers(self, request, context):
        peers = [
            admin_pb2.WorkerPeer(worker_id=name, target=target, transport="grpc")
            for name, target in (("", "10.0.0.1:7001"), ("decode-1", "10.0.0.1:7002"))
        ]
        speeds = [
            admin_pb2.KvSpeed(source="host", bytes_per_s=9_876_000_000),
            admin_pb2.KvSpeed(source="worker", from_worker_id="decode-1", bytes_per_s=10**9),
        ]
        worker = admin_pb2.WorkerInfo(worker_id="prefill-0", peers=peers, kv_speeds=speeds)
        return admin_pb2.ListWorkersResponse(workers=[worker])


class Sizing(admin_pb2_grpc.AdminServicer):
    """A coordinator that reports the decode workers of each step through Watch."""

    def __init__(self, *decode_workers: list[str]) -> None:
        self.decode_workers = decode_workers

    async def Watch(self, request, context):
        for names in self.decode_workers:
            role = common_pb2.ROLE_DECODE
            pool = admin_pb2.PoolInfo(role=role, num_serving=len(names))
            workers = [admin_pb2.WorkerInfo(worker_id=name, role=role) for name in names]
            pools = admin_pb2.ListPoolsResponse(pools=[pool])
            yield admin_pb2.WatchEvent(pools=pools, workers=workers)
        if not self.decode_workers:
            return
        await asyncio.Event().wait()

    async def ScalePool(self, request, context):
        pool = admin_pb2.PoolInfo(role=request.role, num_serving=1)
        return admin_pb2.ScalePoolResponse(pool=pool, message="it begins")

    async def DrainWorker(self, request, context):
        return admin_pb2.DrainWorkerResponse(message="it begins")

    async def FlipWorker(self, request, context):
        return admin_pb2.FlipWorkerResponse(message="it begins")


class Deciding(admin_pb2_grpc.AdminServicer):
    """A coordinator that streams decisions and then ends the stream, or that sizes no pools.

    It made the decisions `before` earlier, the newest first.
    """

    def __init__(self, *told: list[admin_pb2.ScalingDecision], before=()) -> None:
        self.told, self.before = told, before

    async def ListDecisions(self, request, context):
        if not self.told:
            reason = "this coordinator starts no workers"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        before = [one for one in self.before if request.role in (0, one.role)]
        newest = [
            one
            for role in {one.role for one in before}
            for one in [one for one in before if one.role == role][: request.limit or None]
        ]
        return admin_pb2.ListDecisionsResponse(decisions=newest)

    async def Watch(self, request, context):
        for decisions in self.told:
            yield admin_pb2.WatchEvent(decisions=decisions)


class Dropping(admin_pb2_grpc.AdminServicer):
    """A coordinator whose second worker fails to delete its KV blocks."""

    async def DropCache(self, request, context):
        self.asked = request
        return admin_pb2.DropCacheResponse(
            workers=[
                admin_pb2.WorkerCacheDropped(
                    worker_id="p1", device_blocks=3, host_blocks=4, disk_blocks=5
                ),
                admin_pb2.WorkerCacheDropped(worker_id="p2", error="worker p2 was lost"),
            ],
            shared_blocks=7 if request.session_id else 0,
        )


class Ending(Rolling):
    """A coordinator that becomes unavailable after its last event."""

    async def Watch(self, request, context):
        for one in self.told:
            yield admin_pb2.WatchEvent(rollout=one)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it has ended")


@pytest.fixture
def serve():
    """Starts services on an event loop in a thread, because `call_admin` runs its own loop."""
    loop = asyncio.new_event_loop()
    with running(loop), contextlib.ExitStack() as stack:

        def start(service):
            address, stop = run(loop, serving(service))
            stack.callback(lambda: run(loop, stop()))
            return address

        yield start


@pytest.fixture
def coordinators(serve):
    """Starts coordinators that answer the given numbers of calls."""

    def start(*answers):
        services = [OneAnswer(number) for number in answers]
        return [(serve(service), service) for service in services]

    return start


@contextlib.contextmanager
def running(loop):
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(loop, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(HANG_S)


async def serving(service):
    server = rpc.server()
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def stop():
        await server.stop(None)

    return f"127.0.0.1:{port}", stop


def test_dropped_blocks_are_listed_by_worker(serve, capsys):
    service = Dropping()
    address = serve(service)
    # The exit code tells that a worker may have blocks left.
    with pytest.raises(typer.Exit) as left:
        cache.drop(tenant="search", address=address)
    assert left.value.exit_code == 1
    assert (service.asked.tenant, service.asked.all) == ("search", False)
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.split() == ["p1", "3", "4", "5", "deleted"]
    assert "p2 was lost" in second
    with pytest.raises(typer.Exit):
        cache.drop(everything=True, address=address, as_json=True)
    assert (service.asked.tenant, service.asked.all) == ("", True)
    found = json.loads(capsys.readouterr().out)
    assert [one["disk_blocks"] for one in found] == [5, 0]
    with pytest.raises(typer.Exit):
        cache.drop(session="talk", address=address)
    asked = service.asked
    assert (asked.tenant, asked.session_id, asked.all) == ("", "talk", False)
    assert "7 blocks of the session were kept" in capsys.readouterr().err
    with pytest.raises(typer.BadParameter):
        cache.drop(address=address)
    with pytest.raises(typer.BadParameter):
        cache.drop(session="talk", everything=True, address=address)


def test_workers_lists_no_peer_that_is_detached(serve, capsys):
    workers(serve(Peers()))
    shown = capsys.readouterr().out
    assert "decode-1" in shown
    assert "10.0.0.1" not in shown


def test_workers_lists_measured_speeds(serve, capsys):
    workers(serve(Peers()))
    *_, header, host, other = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "WORKER"
    assert host.split() == ["prefill-0", "its", "host", "memory", "9.88", "GB/s"]
    assert other.split() == ["prefill-0", "worker", "decode-1", "1", "GB/s"]


class Silent(OneAnswer):
    """A coordinator that never answers."""

    def __init__(self) -> None:
        super().__init__(0)

    async def ListPools(self, request, context):
        await asyncio.Event().wait()

    async def ScalePool(self, request, context):
        await asyncio.Event().wait()


def soon(silent, call):
    """Returns a question that waits only shortly for the answer of one address."""

    async def question(admin):
        if admin.address == silent:
            # The time does not count until there is a connection.
            async with asyncio.timeout(WAIT_S):
                await admin._channel.channel_ready()
            admin._timeout_s = 2.0
        return await call(admin)

    return question


def test_the_next_address_is_called_if_the_first_does_not_answer(serve, coordinators):
    (there, _), *_ = coordinators(5)
    silent = serve(Silent())
    question = soon(silent, lambda admin: admin.list_pools())
    assert call_admin(f"{silent},{there}", question).generation == 1


def test_no_answer_has_the_exit_code_of_an_unavailable_cell(serve, nowhere):
    """The exit code 1 of `baton doctor` means findings."""
    silent = serve(Silent())
    question = soon(silent, lambda admin: admin.list_pools())
    with pytest.raises(errors.UnavailableError, match="has not answered within 2 s; ") as failed:
        call_admin(f"{silent},{nowhere}", question)
    assert exit_codes.exit_code(failed.value) == 3


class Guarded(admin_pb2_grpc.AdminServicer):
    """A coordinator that wants a credential."""

    async def ListPools(self, request, context):
        missing = "a credential is missing: authorization: Bearer KEY"
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, missing)


def test_a_missing_credential_is_reported_with_the_options_that_set_it(serve):
    with pytest.raises(errors.UnauthenticatedError) as refused:
        call_admin(serve(Guarded()), lambda admin: admin.list_pools())
    assert exit_codes.message(refused.value) == (
        "a credential is missing: authorization: Bearer KEY "
        "(set it by --api-key-file, BATON_API_KEY_FILE or BATON_API_KEY)"
    )


def test_a_change_that_is_not_answered_is_not_repeated_elsewhere(serve):
    silent, other = serve(Silent()), Sized()
    question = soon(silent, lambda admin: admin.scale_pool(common_pb2.ROLE_DECODE, 2))
    with pytest.raises(errors.DeadlineExceededError, match="the change may have happened"):
        call_admin(f"{silent},{serve(other)}", question)
    assert other.sizes == []


async def twice(admin):
    await admin.list_pools()
    return (await admin.list_pools()).generation


def test_the_next_address_is_called_if_the_first_is_unavailable(coordinators):
    (away, _), (there, _) = coordinators(0, 5)
    assert call_admin(f"{away},{there}", twice) == 2


def test_no_other_address_is_called_after_an_answer(coordinators):
    (first, _), (second, other) = coordinators(1, 5)
    with pytest.raises(errors.UnavailableError, match="it has ended"):
        call_admin(f"{first},{second}", twice)
    assert other.asked == 0


@contextlib.contextmanager
def hanging_up(call):
    """Yields an address whose connections break as soon as the call has arrived."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=(listener, call))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.fixture
def nowhere():
    """Yields an address at which no process listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


async def scaled(admin):
    return (await admin.scale_pool(common_pb2.ROLE_DECODE, 3)).message


def test_a_change_that_may_have_happened_is_not_repeated(serve):
    other = Sized()
    with (
        hanging_up(b"ScalePool") as address,
        pytest.raises(errors.UnavailableError, match=f"{address} broke.*change may have happened"),
    ):
        call_admin(f"{address},{serve(other)}", scaled)
    assert other.sizes == []


def test_a_change_that_was_never_sent_goes_to_the_next_address(serve, nowhere):
    other = Sized()
    assert call_admin(f"{nowhere},{serve(other)}", scaled) == "scaled"
    assert other.sizes == [3]


def test_a_read_goes_to_the_next_address_after_a_lost_connection(coordinators):
    ((there, _),) = coordinators(5)
    with hanging_up(b"ListPools") as address:
        assert call_admin(f"{address},{there}", twice) == 2


async def test_a_sent_call_counts_as_sent_although_later_calls_cannot_connect():
    """A coordinator that shuts down accepts no new calls while a call still runs."""

    class Slow(Sized):
        def __init__(self) -> None:
            super().__init__()
            self.asked = asyncio.Event()

        async def ScalePool(self, request, context):
            self.asked.set()
            await asyncio.Event().wait()

    server, slow = rpc.server(), Slow()
    admin_pb2_grpc.add_AdminServicer_to_server(slow, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def connections_are_refused(admin):
        while True:
            try:
                await admin.list_pools()
            except errors.UnreachableError:
                return
            except errors.RemoteError:
                # The coordinator refuses the call because it shuts down.
                await asyncio.sleep(0.01)

    async with (
        asyncio.timeout(HANG_S),
        AdminClient(f"127.0.0.1:{port}", timeout_s=5.0) as admin,
    ):
        asking = asyncio.create_task(scaled(admin))
        await slow.asked.wait()
        stopping = asyncio.create_task(server.stop(60.0))
        await connections_are_refused(admin)
        with pytest.raises(errors.RemoteError, match="change may have happened") as caught:
            await asking
        assert not isinstance(caught.value, errors.UnreachableError)
        assert admin.may_have_acted
    await stopping


async def test_the_error_names_an_address_without_coordinator():
    server = rpc.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AdminClient(f"127.0.0.1:{port}") as admin:
            with pytest.raises(errors.UnimplementedError, match=f":{port} is not a coordinator"):
                await admin.list_pools()
    finally:
        await server.stop(None)


@contextlib.contextmanager
def http_server():
    """Yields the port of a server that answers each connection as HTTP/1 servers answer gRPC.

    A thread closes each connection before the test goes on: gRPC may connect again at any moment.
    """

    def answer():
        # The listening socket's end ends the thread.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(HANG_S)
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


async def test_the_error_says_that_an_address_speaks_http():
    with http_server() as port:
        async with AdminClient(f"127.0.0.1:{port}") as admin:
            with pytest.raises(errors.UnreachableError, match=f":{port}: it speaks HTTP/1, as a g"):
                await admin.list_pools()


def scale(**options):
    pool_sizes.scale(pool_sizes.PoolName.DECODE, 2, **options)


def drain(**options):
    pool_sizes.drain("decode-0", **options)


def flip(**options):
    pool_sizes.flip("decode-0", pool_sizes.PoolName.DECODE, **options)


@pytest.mark.parametrize(
    ("command", "told", "then"),
    [
        (scale, [["decode-1"], ["decode-0", "decode-1"]], "the decode pool has 2 workers"),
        (drain, [["decode-0"], []], "decode-0 has left"),
        (flip, [[], ["decode-0"]], "decode-0 serves decode"),
    ],
)
def test_wait_prints_the_result_of_a_change(serve, capsys, command, told, then):
    address = serve(Sizing(*told))
    command(wait=0.0, address=address, as_json=False)
    assert capsys.readouterr().out == "it begins\n"
    command(wait=HANG_S, address=address, as_json=False)
    assert capsys.readouterr().out == f"it begins\n{then}\n"
    command(wait=HANG_S, address=address, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["message"] == then
    if command is scale:
        assert found["pool"]["num_serving"] == 2


def test_a_wait_fails_when_the_event_stream_ends(serve):
    with pytest.raises(
        errors.UnavailableError, match="ended the event stream; decode-0 has not left"
    ):
        drain(wait=HANG_S, address=serve(Sizing()), as_json=False)


def decision(role, number, reason):
    since = Timestamp(seconds=number)
    return admin_pb2.ScalingDecision(
        role=role,
        from_workers=number,
        to_workers=number + 1,
        reason=reason,
        inputs={"requests": 7},
        since=since,
        at=since,
    )


PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
# The second event contains no decisions.
DECIDED = (
    [decision(PREFILL, 1, "prompts"), decision(DECODE, 1, "outputs")],
    [],
    [decision(DECODE, 2, "more"), decision(DECODE, 3, "yet more")],
)


def test_decisions_are_followed_as_they_are_made(serve, capsys):
    address = serve(Deciding(*DECIDED))
    pool_sizes.why(pool_sizes.PoolName.DECODE, address=address, as_json=True, watch=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["role"], one["reason"]) for one in told] == [
        ("decode", "outputs"),
        ("decode", "more"),
        ("decode", "yet more"),
    ]
    pool_sizes.why(address=address, watch=True)
    assert capsys.readouterr().out.splitlines()[:4] == [
        "00:00:01 UTC  prefill 1 -> 2: prompts",
        "  requests 7",
        "00:00:01 UTC  decode 1 -> 2: outputs",
        "  requests 7",
    ]


@pytest.mark.parametrize(
    ("limit", "reasons"),
    [
        (None, ["newest", "next"]),
        (2, ["newer", "newest", "next"]),
        (0, ["oldest", "newer", "newest", "next"]),
    ],
)
def test_earlier_decisions_are_printed_before_those_that_are_followed(
    serve, capsys, limit, reasons
):
    made = [decision(DECODE, n, why) for n, why in enumerate(("oldest", "newer", "newest", "next"))]
    # The first event repeats the newest decision.
    address = serve(Deciding([made[2]], [made[3]], before=made[2::-1]))
    pool_sizes.why(limit=limit, address=address, as_json=True, watch=True)
    found = [json.loads(line)["reason"] for line in capsys.readouterr().out.splitlines()]
    assert found == reasons


def test_earlier_decisions_of_both_pools_are_printed_in_their_order(serve, capsys):
    made = [decision((PREFILL, DECODE)[n % 2], n, str(n)) for n in range(4)]
    address = serve(Deciding([], before=made[::-1]))
    pool_sizes.why(limit=0, address=address, as_json=True, watch=True)
    found = [json.loads(line)["reason"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["0", "1", "2", "3"]


class Resuming(Deciding):
    """A coordinator whose second Watch sends the latest decision again, and then ends."""

    num_calls = 0

    async def Watch(self, request, context):
        self.num_calls += 1
        yield admin_pb2.WatchEvent(decisions=[decision(DECODE, 1, "outputs")])
        if self.num_calls == 1:
            await asyncio.Event().wait()


def test_watch_continues_over_a_new_connection():
    """The first connection breaks after an event has arrived."""
    shown, loop = [], asyncio.new_event_loop()
    with running(loop):
        address, stop = run(loop, serving(Resuming()))
        relay = Relay(address)
        run(loop, relay.__aenter__())

        def show(event):
            shown.append([one.reason for one in event.decisions])
            if relay.num_connections == 1:
                loop.call_soon_threadsafe(relay.cut)

        try:
            watch.follow_changes(relay.address, True, show)
        finally:
            run(loop, relay.__aexit__())
            run(loop, stop())
    assert (shown, relay.num_connections) == ([["outputs"], ["outputs"]], 2)


def test_a_decision_that_a_coordinator_sends_again_is_printed_once(serve, capsys):
    """A new connection begins with the latest decision of each pool."""
    address = serve(Deciding(*DECIDED, [DECIDED[0][0], DECIDED[2][1]]))
    pool_sizes.why(address=address, watch=True, as_json=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["reason"] for one in told] == ["prompts", "outputs", "more", "yet more"]


def test_why_watch_fails_at_a_coordinator_that_sizes_no_pools(serve):
    with pytest.raises(errors.FailedPreconditionError, match="starts no workers"):
        pool_sizes.why(address=serve(Deciding()), watch=True)


async def test_a_refused_connection_is_an_unreachable_error(nowhere):
    async with AdminClient(nowhere) as admin:
        with pytest.raises(errors.UnreachableError, match="refused"):
            await admin.drain_worker("d1")


def state(*, phase=admin_pb2.ROLLOUT_PHASE_UNSPECIFIED, stable="1", last=""):
    """State of a rollout of r2."""
    canary = admin_pb2.RevisionStatus(name="r2")
    return admin_pb2.RolloutStatus(phase=phase, stable_revision=stable, last=last, canary=canary)


RUNNING = state(phase=admin_pb2.ROLLOUT_PHASE_RUNNING)
PROMOTING = state(phase=admin_pb2.ROLLOUT_PHASE_PROMOTING)


WAITING = state(phase=admin_pb2.ROLLOUT_PHASE_WAITING)


def start(address, *, as_json=False):
    rollout.start("r2", 0.05, engine_arg=None, wait=HANG_S, address=address, as_json=as_json)


@pytest.mark.parametrize("then", [RUNNING, PROMOTING, state(stable="r2")])
def test_start_waits_until_the_canary_serves(serve, capsys, then):
    address = serve(Rolling(WAITING, then))
    start(address)
    assert capsys.readouterr().out == "it is being tried\nrevision r2 serves\n"
    start(address, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"message": "revision r2 serves"}


def test_start_stops_waiting_when_the_rollout_is_aborted(serve):
    with pytest.raises(Aborted, match="the rollout of 'r2' has ended: requested by an operator"):
        start(serve(Rolling(WAITING, state(last="requested by an operator"))))


NEXT = admin_pb2.RolloutStatus(
    phase=admin_pb2.ROLLOUT_PHASE_RUNNING,
    stable_revision="1",
    last="requested by an operator",
    canary=admin_pb2.RevisionStatus(name="r3"),
)


@pytest.mark.parametrize("command", [start, lambda address: promote(address)])
def test_a_wait_ends_when_another_rollout_has_replaced_the_first(serve, command):
    first = WAITING if command is start else RUNNING
    with pytest.raises(Aborted, match=r"the rollout of 'r2' .*: requested by an operator"):
        command(serve(Rolling(first, NEXT)))


def promote(address):
    rollout.promote(drain_timeout=None, wait=HANG_S, address=address, as_json=False)


def test_promote_waits_until_the_canary_is_stable(serve, capsys):
    promote(serve(Rolling(RUNNING, PROMOTING, state(stable="r2"))))
    assert capsys.readouterr().out == "it is being promoted\nrevision r2 is the stable one\n"


class Failing:
    """An AdminClient of a coordinator whose worker starts fail."""

    address = "127.0.0.1:7070"
    problem = "worker decode-1 exited with code 1: no such model"

    async def start_rollout(self, revision, **options):
        return "it is being tried"

    async def promote_rollout(self, drain_s):
        return "it is being promoted"

    async def scale_pool(self, role, workers):
        return admin_pb2.ScalePoolResponse(message="it is being scaled")

    async def watch(self, min_interval_s=0.0):
        event = admin_pb2.WatchEvent(rollout=WAITING)
        event.rollout.problem = self.problem
        event.pools.pools.add(role=DECODE, num_serving=1, problem=self.problem)
        yield event
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("module", "command"),
    [
        (rollout, lambda: rollout.start("r2", 0.05, engine_arg=None, wait=0.001, as_json=False)),
        (rollout, lambda: rollout.promote(drain_timeout=None, wait=0.001, as_json=False)),
        (pool_sizes, lambda: scale(wait=0.001, as_json=False)),
    ],
)
def test_a_wait_that_times_out_says_why_workers_do_not_start(monkeypatch, module, command):
    def call(address, question):
        return asyncio.run(question(Failing()))

    monkeypatch.setattr(module, "call_admin", call)
    with pytest.raises(DeadlineExceeded, match=r"0\.001 s: worker decode-1 exited .* model; "):
        command()


def test_watch_ends_when_its_reader_closes_the_pipe(serve):
    """The command notices this even if no event arrives."""
    command = ["pools", "--watch", "--json", "--address", serve(Rolling(None))]
    with subprocess.Popen(
        [sys.executable, "-m", "baton.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        try:
            assert json.loads(watching.stdout.readline())["pools"] == []
            watching.stdout.close()
            assert watching.wait(HANG_S) == 1
            assert watching.stderr.read() == ""
        finally:
            watching.kill()


async def test_a_pipe_opened_for_reading_and_writing_has_a_reader(tmp_path, monkeypatch):
    """A shell opens such a pipe with `exec 3<>fifo; baton pools --watch >&3`."""
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        monkeypatch.setattr(watch, "_STDOUT", fd)
        async with watch._watch_stdout():
            os.write(fd, b"unread")
            await asyncio.sleep(0.05)
    finally:
        os.close(fd)


def test_promote_fails_when_the_coordinator_ends_during_the_wait(serve):
    service = Ending(RUNNING)
    match = (
        "the canary is not the stable revision yet, but the coordinator has received the command"
    )
    with pytest.raises(errors.UnavailableError, match=match):
        promote(f"{serve(service)},{serve(other := Rolling(RUNNING))}")
    assert (service.num_promotions, other.num_promotions) == (1, 0)


async def test_a_wait_continues_over_a_new_connection():
    """The first connection breaks after an event has arrived."""
    address, stop = await serving(Sizing(["d0"]))
    try:
        async with Relay(address) as relay, AdminClient(relay.address) as admin:

            def is_reconnected(event):
                if relay.num_connections == 1:
                    relay.cut()
                    return False
                return True

            event = await watch.wait_until(admin, is_reconnected, HANG_S, "nothing happened")
            assert [worker.worker_id for worker in event.workers] == ["d0"]
            assert relay.num_connections == 2
    finally:
        await stop()


async def test_a_wait_fails_when_every_connection_breaks():
    class Breaking(Sizing):
        async def Watch(self, request, context):
            relay.cut()
            yield admin_pb2.WatchEvent()

    address, stop = await serving(Breaking())
    try:
        async with Relay(address) as relay, AdminClient(relay.address) as admin:
            with pytest.raises(errors.UnavailableError, match=r"broke: .*; d0 has not left yet"):
                await watch.wait_until(admin, bool, HANG_S, "d0 has not left")
    finally:
        await stop()


def test_promote_wait_is_refused_if_the_coordinator_sends_no_rollouts(serve):
    """The coordinator is older than the command."""
    service = Rolling(None, None)
    with pytest.raises(FailedPrecondition, match="does not report rollouts"):
        promote(serve(service))
    assert service.num_promotions == 0


def test_promote_stops_waiting_when_the_rollout_is_aborted(serve):
    with pytest.raises(Aborted, match="the rollout of 'r2' was not promoted: it was worse"):
        promote(serve(Rolling(RUNNING, PROMOTING, state(last="it was worse"))))


def test_the_error_names_a_coordinator_that_dies_during_a_call():
    """This happens to `baton pools --watch` when the coordinator is killed."""
    with (
        hanging_up(b"ListPools") as address,
        pytest.raises(errors.UnavailableError, match=f"coordinator at {address}"),
    ):
        call_admin(address, twice)


async def test_an_address_that_accepts_but_never_answers_is_unreachable():
    """This also happens where a firewall drops packets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with AdminClient(address, timeout_s=0.3) as admin:
            with pytest.raises(errors.UnavailableError, match=f"cannot reach .* {address}: no"):
                await admin.list_pools()
            assert not admin.may_have_acted


async def test_the_error_names_a_coordinator_that_does_not_answer():
    address, stop = await serving(Silent())
    try:
        async with AdminClient(address, timeout_s=1.0) as admin:
            await admin._channel.channel_ready()
            match = f"{address} has not answered within 1 s"
            with pytest.raises(errors.DeadlineExceededError, match=match):
                await admin.list_pools()
    finally:
        await stop()


def hang_up(listener, call):
    """Speaks HTTP/2 until the call has arrived, then closes the connection."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # SETTINGS, empty.
        seen = b""
        while call not in seen and (more := connection.recv(4096)):
            seen += more
