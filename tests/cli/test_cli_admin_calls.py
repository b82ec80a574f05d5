"""Which of several coordinators a command speaks to, and what it takes for an answer."""

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
from google.protobuf.timestamp_pb2 import Timestamp

from baton.cli import pool_sizes, rollout, watch
from baton.cli.admin_calls import call_admin
from baton.cli.listings import workers
from baton.client import AdminClient, errors
from baton.runtime import rpc
from baton.runtime.errors import Aborted, FailedPrecondition
from baton.v1 import admin_pb2, admin_pb2_grpc, common_pb2


class OneAnswer(admin_pb2_grpc.AdminServicer):
    """A coordinator that answers once, and then is there no more."""

    def __init__(self, answers: int) -> None:
        self.answers, self.asked = answers, 0

    async def ListPools(self, request, context):
        self.asked += 1
        if self.asked > self.answers:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has ended")
        return admin_pb2.ListPoolsResponse(generation=self.asked)


class Sized(admin_pb2_grpc.AdminServicer):
    """A coordinator that notes what it is asked to change."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def ScalePool(self, request, context):
        self.sizes.append(request.workers)
        return admin_pb2.ScalePoolResponse(message="so it is")


class Rolling(admin_pb2_grpc.AdminServicer):
    """A coordinator that tells of its rollout by itself, these states; None: it is too old to."""

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
    """A coordinator with one worker, which has handed over to another and to one that is gone."""

    async def ListWorkers(self, request, context):
        peers = [
            admin_pb2.WorkerPeer(worker_id=name, target=target, transport="grpc")
            for name, target in (("", "10.0.0.1:7001"), ("decode-1", "10.0.0.1:7002"))
        ]
        worker = admin_pb2.WorkerInfo(worker_id="prefill-0", peers=peers)
        return admin_pb2.ListWorkersResponse(workers=[worker])


class Sizing(admin_pb2_grpc.AdminServicer):
    """A coordinator that does what it is asked to a moment later: decode-0 changes."""

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
    """A coordinator that sizes its pools, and ends when it has told all; or sizes none."""

    def __init__(self, *told: list[admin_pb2.ScalingDecision]) -> None:
        self.told = told

    async def ListDecisions(self, request, context):
        if not self.told:
            reason = "this coordinator starts no workers"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        return admin_pb2.ListDecisionsResponse()

    async def Watch(self, request, context):
        for decisions in self.told:
            yield admin_pb2.WatchEvent(decisions=decisions)


class Ending(Rolling):
    """One that ends when it has told all."""

    async def Watch(self, request, context):
        for one in self.told:
            yield admin_pb2.WatchEvent(rollout=one)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it has ended")


@pytest.fixture
def serve():
    """Starts services on a loop of their own; `ask` has one too. Returns the address of each."""
    loop = asyncio.new_event_loop()
    with running(loop), contextlib.ExitStack() as stack:

        def start(service):
            address, stop = run(loop, serving(service))
            stack.callback(lambda: run(loop, stop()))
            return address

        yield start


@pytest.fixture
def coordinators(serve):
    """Starts some that answer so many times each."""

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
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)


async def serving(service):
    server = rpc.server()
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def stop():
        await server.stop(None)

    return f"127.0.0.1:{port}", stop


def test_workers_leaves_out_whom_a_worker_handed_over_to_and_who_is_gone(serve, capsys):
    workers(serve(Peers()))
    shown = capsys.readouterr().out
    assert "decode-1" in shown
    assert "10.0.0.1" not in shown


async def twice(admin):
    await admin.list_pools()
    return (await admin.list_pools()).generation


def test_the_next_one_is_asked_where_the_first_is_not_there(coordinators):
    (away, _), (there, _) = coordinators(0, 5)
    assert call_admin(f"{away},{there}", twice) == 2


def test_nobody_else_is_asked_once_one_has_answered(coordinators):
    (first, _), (second, other) = coordinators(1, 5)
    with pytest.raises(errors.UnavailableError, match="it has ended"):
        call_admin(f"{first},{second}", twice)
    assert other.asked == 0


@contextlib.contextmanager
def hanging_up(call):
    """Where the connection breaks as soon as a call has arrived."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=(listener, call))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.fixture
def nowhere():
    """Where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


async def scaled(admin):
    return (await admin.scale_pool(common_pb2.ROLE_DECODE, 3)).message


def test_what_may_have_been_done_is_not_asked_of_another(serve):
    other = Sized()
    with (
        hanging_up(b"ScalePool") as address,
        pytest.raises(
            errors.UnavailableError, match=f"{address} is lost.*change may have happened"
        ),
    ):
        call_admin(f"{address},{serve(other)}", scaled)
    assert other.sizes == []


def test_what_has_certainly_not_been_done_is_asked_of_another(serve, nowhere):
    other = Sized()
    assert call_admin(f"{nowhere},{serve(other)}", scaled) == "so it is"
    assert other.sizes == [3]


def test_what_changes_nothing_is_asked_of_another_whenever_the_first_is_lost(coordinators):
    ((there, _),) = coordinators(5)
    with hanging_up(b"ListPools") as address:
        assert call_admin(f"{address},{there}", twice) == 2


async def test_a_call_that_was_sent_counts_as_sent_while_others_find_nobody():
    """As of a coordinator that ends, and takes nothing new meanwhile."""

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

    async def nobody_is_found(admin):
        while True:
            try:
                await admin.list_pools()
            except errors.UnreachableError:
                return
            except errors.RemoteError:
                # Refused, by one that ends.
                await asyncio.sleep(0.01)

    async with asyncio.timeout(20.0), AdminClient(f"127.0.0.1:{port}", timeout_s=3.0) as admin:
        asking = asyncio.create_task(scaled(admin))
        await slow.asked.wait()
        stopping = asyncio.create_task(server.stop(60.0))
        await nobody_is_found(admin)
        with pytest.raises(errors.RemoteError, match="change may have happened") as caught:
            await asking
        assert not isinstance(caught.value, errors.UnreachableError)
        assert admin.may_have_acted
    await stopping


async def test_what_is_no_coordinator_is_named():
    server = rpc.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AdminClient(f"127.0.0.1:{port}") as admin:
            with pytest.raises(errors.UnimplementedError, match=f":{port} is no coordinator"):
                await admin.list_pools()
    finally:
        await server.stop(None)


async def test_a_port_of_http_is_told_from_a_coordinators():
    async def answer(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AdminClient(f"127.0.0.1:{port}") as admin:
        with pytest.raises(errors.UnreachableError, match=f":{port}: it speaks HTTP/1, as a gat"):
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
def test_who_waits_is_told_what_came_of_it(serve, capsys, command, told, then):
    address = serve(Sizing(*told))
    command(wait=0.0, address=address, as_json=False)
    assert capsys.readouterr().out == "it begins\n"
    command(wait=10.0, address=address, as_json=False)
    assert capsys.readouterr().out == f"it begins\n{then}\n"
    command(wait=10.0, address=address, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["message"] == then
    if command is scale:
        assert found["pool"]["num_serving"] == 2


def test_a_watch_that_ends_is_not_what_was_waited_for(serve):
    with pytest.raises(
        errors.UnavailableError, match="ended the event stream; decode-0 has not left"
    ):
        drain(wait=10.0, address=serve(Sizing()), as_json=False)


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
# Of some moments nothing else is told.
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


def test_a_coordinator_that_decides_nothing_is_not_followed(serve):
    with pytest.raises(errors.FailedPreconditionError, match="starts no workers"):
        pool_sizes.why(address=serve(Deciding()), watch=True)


async def test_a_client_tells_a_call_that_was_never_sent(nowhere):
    async with AdminClient(nowhere) as admin:
        with pytest.raises(errors.UnreachableError, match="refused"):
            await admin.drain_worker("d1")


def state(*, phase=admin_pb2.ROLLOUT_PHASE_UNSPECIFIED, stable="1", last=""):
    """Of a rollout of r2."""
    canary = admin_pb2.RevisionStatus(name="r2")
    return admin_pb2.RolloutStatus(phase=phase, stable_revision=stable, last=last, canary=canary)


RUNNING = state(phase=admin_pb2.ROLLOUT_PHASE_RUNNING)
PROMOTING = state(phase=admin_pb2.ROLLOUT_PHASE_PROMOTING)


WAITING = state(phase=admin_pb2.ROLLOUT_PHASE_WAITING)


def start(address, *, as_json=False):
    rollout.start("r2", 0.05, engine_arg=None, wait=10.0, address=address, as_json=as_json)


@pytest.mark.parametrize("then", [RUNNING, PROMOTING, state(stable="r2")])
def test_a_start_is_waited_for(serve, capsys, then):
    address = serve(Rolling(WAITING, then))
    start(address)
    assert capsys.readouterr().out == "it is being tried\nrevision r2 serves\n"
    start(address, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"message": "revision r2 serves"}


def test_a_start_that_is_aborted_meanwhile_is_not_waited_for(serve):
    with pytest.raises(Aborted, match="the rollout of 'r2' has ended: an operator asked for it"):
        start(serve(Rolling(WAITING, state(last="an operator asked for it"))))


NEXT = admin_pb2.RolloutStatus(
    phase=admin_pb2.ROLLOUT_PHASE_RUNNING,
    stable_revision="1",
    last="an operator asked for it",
    canary=admin_pb2.RevisionStatus(name="r3"),
)


@pytest.mark.parametrize("command", [start, lambda address: promote(address)])
def test_a_wait_ends_when_another_rollout_has_replaced_the_first(serve, command):
    first = WAITING if command is start else RUNNING
    with pytest.raises(Aborted, match=r"the rollout of 'r2' .*: an operator asked for it"):
        command(serve(Rolling(first, NEXT)))


def promote(address):
    rollout.promote(drain_timeout=None, wait=10.0, address=address, as_json=False)


def test_a_promotion_is_waited_for(serve, capsys):
    promote(serve(Rolling(RUNNING, PROMOTING, state(stable="r2"))))
    assert capsys.readouterr().out == "it is being promoted\nrevision r2 is the stable one\n"


def test_watching_ends_with_its_reader(serve):
    """Also while nothing changes."""
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
            assert watching.wait(30) == 1
            assert watching.stderr.read() == ""
        finally:
            watching.kill()


async def test_a_pipe_that_is_open_for_reading_too_has_a_reader(tmp_path, monkeypatch):
    """As in a shell's `exec 3<>fifo; baton pools --watch >&3`."""
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        monkeypatch.setattr(watch, "_STDOUT", fd)
        async with watch._reader():
            os.write(fd, b"unread")
            await asyncio.sleep(0.05)
    finally:
        os.close(fd)


def test_a_coordinator_that_ends_while_a_promotion_is_waited_for(serve):
    service = Ending(RUNNING)
    match = "the canary is not the stable revision yet, but the coordinator was told to do it"
    with pytest.raises(errors.UnavailableError, match=match):
        promote(f"{serve(service)},{serve(other := Rolling(RUNNING))}")
    assert (service.num_promotions, other.num_promotions) == (1, 0)


def test_a_promotion_that_nobody_tells_of_is_not_begun(serve):
    """A coordinator that is older than the command."""
    service = Rolling(None, None)
    with pytest.raises(FailedPrecondition, match="does not tell of rollouts"):
        promote(serve(service))
    assert service.num_promotions == 0


def test_a_rollout_that_is_aborted_meanwhile_is_not_promoted(serve):
    with pytest.raises(Aborted, match="the rollout of 'r2' was not promoted: it was worse"):
        promote(serve(Rolling(RUNNING, PROMOTING, state(last="it was worse"))))


def test_a_coordinator_that_goes_away_under_a_question_is_named():
    """As in `baton pools --watch` when it is killed."""
    with (
        hanging_up(b"ListPools") as address,
        pytest.raises(errors.UnavailableError, match=f"coordinator at {address}"),
    ):
        call_admin(address, twice)


async def test_where_nobody_speaks_there_is_no_coordinator():
    """As where packets are dropped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with AdminClient(address, timeout_s=0.3) as admin:
            with pytest.raises(errors.UnavailableError, match=f"cannot reach .* {address}: no"):
                await admin.list_pools()
            assert not admin.may_have_acted


async def test_a_coordinator_that_does_not_answer_is_named():
    class Silent(OneAnswer):
        async def ListPools(self, request, context):
            await asyncio.Event().wait()

    address, stop = await serving(Silent(0))
    try:
        async with AdminClient(address, timeout_s=1.0) as admin:
            await admin._channel.channel_ready()
            match = f"{address} has not answered within 1 s"
            with pytest.raises(errors.DeadlineExceededError, match=match):
                await admin.list_pools()
    finally:
        await stop()


def hang_up(listener, call):
    """Speaks HTTP/2 until the question is there, and goes."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # SETTINGS, empty.
        seen = b""
        while call not in seen and (more := connection.recv(4096)):
            seen += more
