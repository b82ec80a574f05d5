"""Whole handoffs between two real services on loopback."""

import asyncio
import contextlib
import dataclasses
import io
import os
import resource
import signal
import stat
import sys

import psutil
import pytest

from baton.kvtransfer import local_wire, transfer_client
from baton.kvtransfer.arena import SEGMENT_DIRECTORY
from baton.kvtransfer.engine_port import EnginePort, split_blocks
from baton.kvtransfer.errors import ServiceGone, TransferRefused
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb

WAIT_S = 120.0
COMMITTED, FAILED = pb.LocalSendState.STATE_COMMITTED, pb.LocalSendState.STATE_FAILED


async def test_bytes_arrive_intact_and_staging_is_empty_after(pair, handoff):
    sender, receiver = pair
    handoffs = [handoff(num_blocks) for num_blocks in (1, 2, 3, 7, 16)]
    for each in handoffs:
        await each.open(sender, receiver.client.address)
    for layer in range(3):
        for each in handoffs:
            each.fill(sender, [layer])
    for each in handoffs:
        sent = await sender.sent(each.handoff_id)
        assert (sent.state, sent.num_bytes) == (COMMITTED, len(each.data))
        await receiver.received(each.handoff_id, pb.HANDOFF_STATE_COMMITTED)
        assert each.load(receiver) == each.data
        assert each.load(receiver) is None
    sent, received = await sender.empty(), await receiver.empty()
    assert sent.bytes_sent == received.bytes_received == sum(len(each.data) for each in handoffs)
    assert sent.handoffs_committed == received.handoffs_committed == len(handoffs)


async def test_no_byte_of_an_ended_handoff_is_left_after_an_erasure(pair, handoff):
    sender, receiver = pair
    ended, waiting = handoff(7), handoff(5)
    for each in (ended, waiting):
        await each.open(sender, receiver.client.address)
    for each in (ended, waiting):
        each.fill(sender)
        await sender.sent(each.handoff_id)
        await receiver.received(each.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    assert ended.load(receiver) == ended.data
    await sender.empty()
    # A free place keeps its bytes.
    block = ended.data[:4096]
    assert block in bytes(sender.port.memory)
    assert block in bytes(receiver.port.memory)
    await asyncio.gather(sender.client.erase_staging(), receiver.client.erase_staging())
    assert not any(bytes(sender.port.memory))
    assert block not in bytes(receiver.port.memory)
    # A handoff that is under way is overwritten when it has ended.
    assert waiting.load(receiver) == waiting.data
    await receiver.empty()
    await receiver.client.erase_staging()
    assert not any(bytes(receiver.port.memory))
    # Staging is as good as before.
    later = handoff(16)
    await later.open(sender, receiver.client.address)
    later.fill(sender)
    await sender.sent(later.handoff_id)
    await receiver.received(later.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    assert later.load(receiver) == later.data


async def test_handoffs_queue_for_room_and_all_arrive(start, handoff, layout):
    sender, receiver = await asyncio.gather(start(), start(receive_bytes=layout.handoff_bytes(4)))
    handoffs = [handoff(3) for _ in range(4)]
    for each in handoffs:
        await each.open(sender, receiver.client.address)
        each.fill(sender)
    done = []
    while len(done) < len(handoffs):
        await receiver.until(
            lambda: any(
                receiver.state(each.handoff_id) == pb.HANDOFF_STATE_COMMITTED
                for each in handoffs
                if each not in done
            )
        )
        for each in handoffs:
            if each not in done and (loaded := each.load(receiver)) is not None:
                assert loaded == each.data
                done.append(each)
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_a_handoff_without_room_is_refused_in_time(start, handoff, layout):
    size = layout.handoff_bytes(4)
    sender, receiver = await asyncio.gather(start(send_bytes=size * 2), start(receive_bytes=size))
    with pytest.raises(TransferRefused, match="sender's staging has") as failed:
        await handoff(9).open(sender, receiver.client.address)
    assert failed.value.reason == pb.REFUSAL_REASON_TOO_LARGE
    large, first, second, third = handoff(8), handoff(4), handoff(4), handoff(1)
    await large.open(sender, receiver.client.address)
    refused = await sender.sent(large.handoff_id)
    assert refused.reason == pb.REFUSAL_REASON_TOO_LARGE
    await sender.empty()
    await first.open(sender, receiver.client.address)
    await receiver.received(first.handoff_id, pb.HANDOFF_STATE_RECEIVING)
    await second.open(sender, receiver.client.address, wait_s=1.0)
    with pytest.raises(TransferRefused, match="no room") as failed:
        await third.open(sender, receiver.client.address, wait_s=0.05)
    assert failed.value.reason == pb.REFUSAL_REASON_NO_ROOM
    refused = await sender.sent(second.handoff_id)
    assert refused.reason == pb.REFUSAL_REASON_NO_ROOM
    first.fill(sender)
    assert (await sender.sent(first.handoff_id)).state == COMMITTED
    assert first.load(receiver) == first.data
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_caches_that_differ_are_refused_with_both_values(start, handoff, layout):
    other = dataclasses.replace(layout, dtype="bfloat16")
    sender, receiver = await asyncio.gather(start(), start(other))
    one = handoff(2)
    await one.open(sender, receiver.client.address)
    sent = await sender.sent(one.handoff_id)
    assert sent.reason == pb.REFUSAL_REASON_FINGERPRINT
    assert "dtype is 'float32', here 'bfloat16'" in sent.detail
    received = await receiver.received(one.handoff_id, pb.HANDOFF_STATE_FAILED)
    assert received.reason == pb.REFUSAL_REASON_FINGERPRINT
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_no_handoff_is_taken_before_the_fingerprint_is_known(start, handoff):
    sender, receiver = await asyncio.gather(start(), start(None))
    one = handoff(1)
    await one.open(sender, receiver.client.address)
    sent = await sender.sent(one.handoff_id)
    assert sent.state == FAILED
    assert sent.detail == f"{receiver.client.address}: the engine is not ready yet"
    with pytest.raises(TransferRefused, match="not configured yet"):
        await one.open(receiver, sender.client.address)


@pytest.mark.parametrize("stage", ["opened", "half sent", "committed"])
async def test_a_cancel_at_any_stage_frees_both_ends(pair, handoff, stage):
    sender, receiver = pair
    for who in ("sender aborts", "its engine aborts", "receiver drops", "engine releases"):
        one = handoff(8)
        await one.open(sender, receiver.client.address)
        await receiver.received(one.handoff_id, pb.HANDOFF_STATE_RECEIVING)
        if stage == "half sent":
            one.fill(sender, [0, 1])
        elif stage == "committed":
            one.fill(sender)
            await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
            await sender.sent(one.handoff_id)
        ended = pb.HANDOFF_STATE_FAILED
        if who == "sender aborts":
            sender.client.abort_send(one.handoff_id)
            sender.client.abort_send(one.handoff_id)
            if stage == "committed":
                receiver.client.drop(one.handoff_id)
        elif who == "its engine aborts":
            sender.port.abort_send(one.handoff_id)
            sender.port.abort_send(one.handoff_id)
            if stage == "committed":
                receiver.client.drop(one.handoff_id)
        elif who == "receiver drops":
            receiver.client.drop(one.handoff_id)
        else:
            receiver.port.release(one.handoff_id, all_shards=True)
            ended = pb.HANDOFF_STATE_RELEASED
        state = await receiver.received(one.handoff_id, ended)
        if ended == pb.HANDOFF_STATE_FAILED:
            assert state.reason == pb.REFUSAL_REASON_CANCELLED
        if who != "sender aborts" and stage != "committed":
            sent = await sender.sent(one.handoff_id)
            assert (sent.state, sent.reason) == (FAILED, pb.REFUSAL_REASON_CANCELLED)
        assert one.load(receiver) is None
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_a_drop_before_the_open_refuses_it(pair, handoff):
    sender, receiver = pair
    one = handoff(1)
    receiver.client.drop(one.handoff_id)
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_FAILED)
    await one.open(sender, receiver.client.address)
    assert (await sender.sent(one.handoff_id)).reason == pb.REFUSAL_REASON_CANCELLED
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_cancelling_an_open_that_waits_leaves_nothing(start, handoff, layout):
    sender, receiver = await asyncio.gather(start(send_bytes=layout.handoff_bytes(4)), start())
    first, second = handoff(4), handoff(4)
    await first.open(sender, receiver.client.address)
    opening = asyncio.create_task(second.open(sender, receiver.client.address))
    while not (await sender.client.stats()).num_waiting_sends:
        await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    sender.client.abort_send(first.handoff_id)
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_idle_committed_and_claimed_handoffs_expire(start, handoff):
    # Each receiver has one short limit, so that a slow machine cannot reach another limit first.
    sender, *receivers = await asyncio.gather(
        start(), start(idle_timeout_s=1.0), start(commit_ttl_s=1.0), start(claim_timeout_s=1.0)
    )
    idle, unloaded, claimed = handoffs = [handoff(1) for _ in receivers]
    for each, receiver in zip(handoffs, receivers, strict=True):
        await each.open(sender, receiver.client.address)
    unloaded.fill(sender)
    claimed.fill(sender)
    await sender.sent(claimed.handoff_id)
    assert receivers[-1].port.claim(claimed.handoff_id, 0, timeout_s=WAIT_S) is not None
    for each, receiver in zip(handoffs, receivers, strict=True):
        state = await receiver.received(each.handoff_id, pb.HANDOFF_STATE_FAILED)
        assert state.reason == pb.REFUSAL_REASON_EXPIRED
        assert receiver.port.claim(each.handoff_id, 1, timeout_s=WAIT_S) is None
        await receiver.empty(may_expire=True)
    assert (await sender.sent(idle.handoff_id)).reason == pb.REFUSAL_REASON_EXPIRED
    await sender.empty()


async def test_a_killed_sender_fails_its_handoffs_at_once(pair, handoff):
    sender, receiver = pair
    one, done = handoff(8), handoff(2)
    for each in (one, done):
        await each.open(sender, receiver.client.address)
    done.fill(sender)
    await receiver.received(done.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    # The two handoffs have connections of their own.
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_RECEIVING)
    one.fill(sender, [0])
    os.kill(sender.client.pid, signal.SIGKILL)
    state = await receiver.received(one.handoff_id, pb.HANDOFF_STATE_FAILED)
    assert state.reason == pb.REFUSAL_REASON_INCOMPLETE
    assert one.load(receiver) is None
    assert done.load(receiver) == done.data
    await receiver.empty()
    await asyncio.wait_for(sender.client.gone.wait(), WAIT_S)
    assert "exit code -9" in sender.client.gone_reason
    with pytest.raises(ServiceGone):
        await one.open(sender, receiver.client.address)
    with pytest.raises(ServiceGone):
        await sender.until(lambda: False)
    # The engine's port returns empty values and does not raise.
    assert not sender.port.send_frames([])
    assert sender.port.claim(one.handoff_id, 0) is None
    assert sender.port.poll() == []
    assert not sender.port.alive


async def test_a_killed_receiver_fails_its_handoffs_at_once(pair, handoff):
    sender, receiver = pair
    one = handoff(8)
    await one.open(sender, receiver.client.address)
    one.fill(sender, [0])
    os.kill(receiver.client.pid, signal.SIGKILL)
    assert (await sender.sent(one.handoff_id)).state == FAILED
    late = handoff(1)
    await late.open(sender, receiver.client.address)
    sent = await sender.sent(late.handoff_id)
    assert sent.state == FAILED
    assert receiver.client.address in sent.detail
    await sender.empty()


async def test_a_service_whose_replies_cannot_be_handled_is_given_up(pair, monkeypatch):
    """Without a notice, the worker would wait for handoffs for ever."""
    sender, _ = pair

    def fail(self, reply):
        raise KeyError("not expected")

    monkeypatch.setattr(TransferClient, "_take", fail)
    with pytest.raises(ServiceGone, match="KeyError: 'not expected'"):
        await sender.client.stats()
    assert sender.client.gone.is_set()


async def test_a_stopped_receiver_fails_a_send_after_its_timeout(start, handoff):
    sender, receiver = await asyncio.gather(start(open_timeout_s=0.1), start())
    one = handoff(8)
    os.kill(receiver.client.pid, signal.SIGSTOP)
    try:
        await one.open(sender, receiver.client.address)
        sent = await sender.sent(one.handoff_id)
        assert sent.state == FAILED
        assert receiver.client.address in sent.detail
        # A claim without a reply has a timeout as well.
        assert receiver.port.claim(one.handoff_id, 0, timeout_s=0.1) is None
    finally:
        os.kill(receiver.client.pid, signal.SIGCONT)
    await asyncio.gather(sender.empty(may_expire=True), receiver.empty())


async def test_a_claim_waits_no_longer_than_it_is_told_and_is_answered_later(pair, handoff):
    sender, receiver = pair
    one, port = handoff(8), receiver.port
    await one.open(sender, receiver.client.address)
    one.fill(sender)
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    os.kill(receiver.client.pid, signal.SIGSTOP)
    try:
        claims = [port.begin_claim(one.handoff_id, shard) for shard in (0, 0, 7)]
        given_up = port.begin_claim(one.handoff_id, 0)
        assert not any(claim.wait(0.0) for claim in claims)
        given_up.give_up()
    finally:
        os.kill(receiver.client.pid, signal.SIGCONT)
    assert all(claim.wait(WAIT_S) for claim in reversed(claims))
    first, second, of_no_shard = (claim.claim for claim in claims)
    assert first == second
    assert first.num_blocks == 8
    assert (of_no_shard, given_up.claim) == (None, None)
    # An answer that is not waited for is not kept.
    assert not port._replies
    port.release(one.handoff_id, all_shards=True)
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_states_reach_a_late_subscriber_that_polls_seldom(pair, handoff):
    sender, receiver = pair
    handoffs = [handoff(1) for _ in range(5)]
    for each in handoffs:
        await each.open(sender, receiver.client.address)
        each.fill(sender)
        await receiver.received(each.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    late = EnginePort(receiver.client.socket_path)
    late.subscribe()
    for port in (receiver.port, late):
        seen = {}
        while len(seen) < len(handoffs):
            seen |= {state.handoff_id: state.state for state in port.poll()}
        assert set(seen.values()) == {pb.HANDOFF_STATE_COMMITTED}
    late.close()
    for each in handoffs:
        receiver.port.release(each.handoff_id, all_shards=True)
    await receiver.empty()


async def test_the_socket_is_private(pair):
    _, receiver = pair
    mode = os.stat(receiver.client.socket_path).st_mode
    assert stat.S_ISSOCK(mode)
    assert mode & 0o777 == 0o600


async def test_a_service_that_cannot_start_gives_one_line_of_reason(start, tmp_path):
    running = await start()
    wrong = {
        "kv_transfer.listen: cannot listen on": {"listen": running.client.address},
        "kv_transfer.listen: is 'nowhere'": {"listen": "nowhere"},
        "bytes free": {"receive_bytes": 2**60},
    }
    for words, config in wrong.items():
        with pytest.raises(ServiceGone, match=words) as caught:
            await TransferClient.start(KvTransferConfig(**config), str(tmp_path / "other.sock"))
        assert "\n" not in str(caught.value)
    with pytest.raises(ServiceGone, match="another service listens on it"):
        await TransferClient.start(KvTransferConfig(), running.client.socket_path)


# Replaces the Python interpreter: a service that creates its segment, writes the segment's name to
# a file, never serves, and does not end on SIGTERM.
SLOW_SERVICE = """#!/bin/sh
exec {python} -c '
import signal
import time
from pathlib import Path
from baton.kvtransfer.arena import Segment
signal.signal(signal.SIGTERM, lambda *_: Path("{asked}").touch())
segment = Segment.create(4096)
Path("{made}.new").write_text(segment.name)
Path("{made}.new").rename("{made}")
time.sleep(600)
'
"""


@pytest.mark.parametrize("is_hurried", [False, True])
async def test_a_cancelled_start_leaves_no_segment(tmp_path, monkeypatch, is_hurried):
    """Also when the caller cancels again while it waits for the end of the process."""
    made, asked, program = tmp_path / "made", tmp_path / "asked", tmp_path / "python"
    program.write_text(SLOW_SERVICE.format(python=sys.executable, made=made, asked=asked))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(transfer_client, "STOP_TIMEOUT_S", 60.0 if is_hurried else 0.1)
    starting = asyncio.create_task(
        TransferClient.start(KvTransferConfig(), str(tmp_path / "kv.sock"), timeout_s=600)
    )
    async with asyncio.timeout(WAIT_S):
        while not made.exists():
            assert not starting.done()
            await asyncio.sleep(0.01)
    segment = SEGMENT_DIRECTORY / made.read_text()
    assert segment.exists()
    starting.cancel()
    if is_hurried:
        async with asyncio.timeout(WAIT_S):
            while not asked.exists():
                assert not starting.done()
                await asyncio.sleep(0.01)
        starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert not segment.exists()


SILENT_SERVICE = """#!{python}
import sys
from baton.kvtransfer.service import service

async def silent(shell, server, health, listener, stop, *_):
    await stop.wait()

service._run, sys.argv[1:] = silent, sys.argv[3:]
sys.exit(service.main())
"""


async def test_a_service_that_is_cancelled_while_it_starts_cleans_up(short_path, monkeypatch):
    program, directory = short_path / "python", short_path / "sockets"
    program.write_text(SILENT_SERVICE.format(python=sys.executable))
    program.chmod(0o755)
    directory.mkdir()
    monkeypatch.setattr(sys, "executable", str(program))
    # Little staging: a service that is still preparing memory after STOP_TIMEOUT_S is killed.
    staging = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    starting = asyncio.create_task(
        TransferClient.start(staging, str(directory / "kv.sock"), timeout_s=WAIT_S)
    )
    async with asyncio.timeout(WAIT_S):
        while not (segment := segment_of(str(directory))):
            assert not starting.done()
            await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert os.listdir(directory) == []
    assert segment not in os.listdir(SEGMENT_DIRECTORY)


# A service that prints more to stderr than a pipe holds, before it serves and at each statistics:
# many lines, and a line longer than the limit of the parent's reader.
NOISY_SERVICE = """#!{python}
import sys
from baton.kvtransfer.service import service

def noisy(function):
    def made(*arguments):
        sys.stderr.write("line\\n" * 2**17 + "long" * 2**18 + "\\n")
        return function(*arguments)
    return made

service.limits = noisy(service.limits)
service.TransferShell.statistics = noisy(service.TransferShell.statistics)
sys.argv[1:] = sys.argv[3:]
sys.exit(service.main())
"""


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_service_that_prints_much_goes_on(is_closed, short_path, monkeypatch):
    """Also where the worker's own stderr is closed, so that nothing can be passed on."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    program, directory = short_path / "python", short_path / "sockets"
    program.write_text(NOISY_SERVICE.format(python=sys.executable))
    program.chmod(0o755)
    directory.mkdir()
    monkeypatch.setattr(sys, "executable", str(program))
    staging = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    client = await TransferClient.start(staging, str(directory / "kv.sock"), timeout_s=WAIT_S)
    if is_closed:
        stderr.close()
    try:
        for _ in range(3):
            assert (await client.stats()).num_sends == 0
    finally:
        await client.close()
    # Not all lines of the start are kept, and all further ones are printed.
    assert is_closed or stderr.getvalue().splitlines().count("line") > 3 * 2**17


def segment_of(directory):
    """Returns the segment of the service whose socket is there, once the service has both."""
    for child in psutil.Process().children() if os.listdir(directory) else []:
        if directory in " ".join(child.cmdline()):
            for file in child.open_files():
                if file.path.startswith(f"{SEGMENT_DIRECTORY}/"):
                    return os.path.basename(file.path)
    return None


async def test_a_refused_configuration_does_not_end_the_service(start, layout):
    worker = await start(None)
    reader, writer = await asyncio.open_unix_connection(worker.client.socket_path)
    refused = pb.LocalRequest(call_id=1, configure=pb.LocalConfigure())
    writer.write(local_wire.encode(refused))
    assert b"protocol_version" in await reader.read(2**16)
    writer.close()
    await writer.wait_closed()
    await worker.client.configure(layout.fingerprint())
    assert not worker.client.gone.is_set()


async def test_a_service_ends_on_sigterm_and_cleans_up(start):
    worker = await start()
    os.kill(worker.client.pid, signal.SIGTERM)
    await asyncio.wait_for(worker.client.gone.wait(), WAIT_S)
    assert "exit code 0" in worker.client.gone_reason


async def test_a_service_ignores_a_closed_terminal_and_cleans_up(start):
    worker = await start()
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGTERM):
        os.kill(worker.client.pid, number)
    await asyncio.wait_for(worker.client.gone.wait(), WAIT_S)
    assert "exit code 0" in worker.client.gone_reason


async def test_a_port_works_in_an_engine_with_many_open_files(pair, handoff):
    sender, receiver = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while (number := os.open(os.devnull, os.O_RDONLY)) < 1024:
            files.callback(os.close, number)
        files.callback(os.close, number)
        port = EnginePort(receiver.client.socket_path, timeout_s=WAIT_S)
        files.callback(port.close)
        one = handoff(2)
        await one.open(sender, receiver.client.address)
        one.fill(sender)
        await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
        claim = port.claim(one.handoff_id, 0, timeout_s=WAIT_S)
        assert claim is not None
        assert claim.num_blocks == 2
        receiver.port.release(one.handoff_id, all_shards=True)
        await receiver.empty()


def test_block_runs_are_split_into_frames_of_bounded_size():
    assert list(split_blocks(3, 10, 1024, 4096)) == [(3, 4), (7, 4), (11, 2)]
    assert list(split_blocks(0, 2, 10_000, 4096)) == [(0, 1), (1, 1)]


KILLED_WORKER = """
import asyncio, os, signal, sys
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import KvTransferConfig

async def main():
    client = await TransferClient.start(KvTransferConfig(), sys.argv[1])
    port = EnginePort(client.socket_path)
    # A child that keeps every inherited descriptor open until the test writes to its stdin.
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
    print(client.pid, port.description.shm_name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_killed_worker_leaves_no_service_even_with_its_socket_inherited(tmp_path):
    path = str(tmp_path / "kv.sock")
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        "-c",
        KILLED_WORKER,
        path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        pid, shm_name = (await asyncio.wait_for(worker.stdout.readline(), WAIT_S)).split()
        ended = asyncio.Event()
        with contextlib.suppress(ProcessLookupError):
            watch = os.pidfd_open(int(pid))
            asyncio.get_running_loop().add_reader(watch, ended.set)
            try:
                await asyncio.wait_for(ended.wait(), WAIT_S)
            finally:
                asyncio.get_running_loop().remove_reader(watch)
                os.close(watch)
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.communicate(b"x")
    assert os.listdir(tmp_path) == []
    assert not (SEGMENT_DIRECTORY / shm_name.decode()).exists()


async def test_a_send_that_shrinks_arrives_with_its_new_size(pair, handoff):
    sender, receiver = pair
    each = handoff(8)
    await each.open(sender, receiver.client.address)
    await receiver.received(each.handoff_id, pb.HANDOFF_STATE_RECEIVING)
    small = handoff(3)
    small.handoff_id = each.handoff_id
    small.offset = await sender.client.shrink_send(each.handoff_id, 3, small.num_tokens)
    assert small.offset == each.offset
    small.fill(sender)
    sent = await sender.sent(each.handoff_id)
    assert (sent.state, sent.num_bytes, sent.epoch) == (COMMITTED, len(small.data), 2)
    received = await receiver.received(each.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    assert (received.num_blocks, received.num_tokens) == (3, small.num_tokens)
    assert small.load(receiver) == small.data
    with pytest.raises(TransferRefused, match="is not being sent"):
        await sender.client.shrink_send(each.handoff_id, 1, 1)
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_a_service_that_was_stopped_with_its_worker_has_time_to_answer(pair, monkeypatch):
    """A machine that pauses stops both; a timeout that passed meanwhile is no answer missed."""
    sender, _ = pair
    loop = asyncio.get_running_loop()
    asked = asyncio.create_task(sender.client.stats())
    # The request is written, and the pause begins.
    await asyncio.sleep(0)
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + transfer_client.CALL_TIMEOUT_S)
    assert (await asked).send_bytes_used == 0
    assert not sender.client.gone.is_set()
