"""Runs thousands of handoffs with faults and checks their bytes, leaks and memory growth.

`python -m baton.bench.soak --help`. Four workers with real transfer services send to and receive
from each other. Different pairs have different transports in common, so that every transport is
used all the time. Two of the workers are killed from time to time and replaced. The bytes of a
handoff follow from its ID, so every load can be checked. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from baton.bench import interrupts, soak_report
from baton.bench.soak_handoffs import (
    ANSWER_TIMEOUT_S,
    LAYOUT,
    MIB,
    SHARES,
    TRANSPORTS,
    Fault,
    Handoff,
    Incarnation,
    Outcome,
    Undue,
)
from baton.kvtransfer.errors import ServiceGone, TransferRefused
from baton.kvtransfer.frames import checksum
from baton.kvtransfer.loopback import Watch, Worker
from baton.load import stats
from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb

# 6 KiB to 3 MiB.
MAX_BLOCKS = 512
LIMITS = {
    "send_bytes": 96 * MIB,
    "receive_bytes": 96 * MIB,
    "open_timeout_s": 10.0,
    "idle_timeout_s": 5.0,
    "commit_ttl_s": 5.0,
    "claim_timeout_s": 5.0,
}
# Indexes of the workers that are killed, in turn.
KILLED_PLACES = (2, 3)
CONCURRENCY = 64
# Longer than every timeout of a service, so a handoff that takes longer counts as hung.
HANDOFF_TIMEOUT_S = 40.0
SETTLE_TIMEOUT_S = 20.0
# The workers' memory is sampled once per this many handoffs.
SAMPLE_EVERY = 1000


class Soak:
    """Runs the handoffs and records their outcomes.

    Attributes:
        everyone: All workers, also those that were killed.
        outcomes: Number of handoffs by injected fault and outcome.
        committed_by: Number of committed handoffs by transport.
        num_fallbacks: How often a sender changed to another transport.
        num_bytes_loaded: Bytes that the receiving engines have read.
        undue: Handoffs with an end that their injected fault does not explain, in words.
        left: Resources that were left behind at the end, in words.
    """

    def __init__(self, directory: Path, num_handoffs: int, num_kills: int, seed: int) -> None:
        self._directory, self._num_handoffs = directory, num_handoffs
        self._kill_every = num_handoffs // (num_kills + 1) + 1
        self._source = random.Random(seed)
        self._places: list[Incarnation | None] = [None] * len(TRANSPORTS)
        self._num_begun = 0
        self._replacing: set[asyncio.Task[None]] = set()
        self.everyone: list[Incarnation] = []
        self.outcomes: Counter[tuple[Fault, Outcome]] = Counter()
        self.committed_by: Counter[str] = Counter()
        self.num_fallbacks = 0
        self.num_bytes_loaded = 0
        self.undue: list[str] = []
        self.left: list[str] = []

    async def run(self) -> None:
        """Runs the soak, from the start of the services to their end."""
        try:
            await asyncio.gather(*(self._start(place) for place in range(len(TRANSPORTS))))
            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(self._repeat_handoffs())
            await asyncio.gather(*self._replacing)
            await asyncio.gather(*(self._settle(each) for each in self._alive()))
        finally:
            await asyncio.gather(*(each.worker.close() for each in self._alive()))
        self._look_for_remains()

    def count(self, *outcomes: Outcome) -> int:
        return sum(n for (_, outcome), n in self.outcomes.items() if outcome in outcomes)

    def _alive(self) -> list[Incarnation]:
        return [each for each in self._places if each is not None]

    async def _start(self, place: int) -> None:
        config = KvTransferConfig(transports=TRANSPORTS[place], **LIMITS)
        worker = await Worker.start(config, self._directory, LAYOUT)
        incarnation = Incarnation(place, worker)
        self._places[place] = incarnation
        self.everyone.append(incarnation)

    async def _replace(self, place: int) -> None:
        """Kills a worker's service and starts a new worker in its place."""
        killed = self._places[place]
        if killed is None:
            return
        killed.killed, self._places[place] = True, None
        os.kill(killed.worker.client.pid, signal.SIGKILL)
        await killed.worker.client.gone.wait()
        await self._start(place)
        # The engine still uses the segment until its last handoff has ended.
        await killed.idle.wait()
        await killed.worker.close()

    async def _repeat_handoffs(self) -> None:
        while self._num_begun < self._num_handoffs:
            self._num_begun += 1
            if self._num_begun % self._kill_every == 0:
                index = self._num_begun // self._kill_every % len(KILLED_PLACES)
                place = KILLED_PLACES[index]
                self._replacing.add(asyncio.create_task(self._replace(place)))
            if self._num_begun % SAMPLE_EVERY == 0:
                self._sample()
            handoff = self._draw()
            pair = handoff.sender, handoff.receiver
            for each in pair:
                each.taking_part(1)
            try:
                outcome = await self._outcome(handoff)
            finally:
                for each in pair:
                    each.taking_part(-1)
            self.outcomes[handoff.fault, outcome] += 1

    def _draw(self) -> Handoff:
        source = self._source
        sender, receiver = source.sample(self._alive(), 2)
        (fault,) = source.choices(list(SHARES), list(SHARES.values()))
        handoff_id = source.randbytes(16)
        num_blocks = round(math.exp(source.uniform(0, math.log(MAX_BLOCKS))))
        return Handoff(handoff_id, fault, sender, receiver, num_blocks, random.Random(handoff_id))

    def _sample(self) -> None:
        for each in self._alive():
            each.private_bytes.append(each.worker.private_bytes())
            each.num_files.append(each.worker.num_files())

    async def _outcome(self, handoff: Handoff) -> Outcome:
        sender, receiver = handoff.sender.worker, handoff.receiver.worker
        with (
            sender.watching(handoff.handoff_id) as sending,
            receiver.watching(handoff.handoff_id) as receiving,
        ):
            try:
                async with asyncio.timeout(HANDOFF_TIMEOUT_S):
                    return await self._play(handoff, sending, receiving)
            except TransferRefused:
                return Outcome.LOST if handoff.killed else Outcome.NO_ROOM
            except (ServiceGone, Undue, TimeoutError) as error:
                if handoff.killed:
                    return Outcome.LOST
                hung = isinstance(error, TimeoutError)
                states = _last_states(sending, receiving)
                self.undue.append(f"{handoff}: {error or 'hung'}; {states}")
                return Outcome.HUNG if hung else Outcome.UNDUE
            finally:
                self.num_fallbacks += sending.send.num_fallbacks if sending.send else 0
                # A worker does the same when the request of a failed send has ended.
                if sending.send is None or not _committed(sending.send):
                    sender.client.abort_send(handoff.handoff_id)

    async def _play(self, handoff: Handoff, sending: Watch, receiving: Watch) -> Outcome:
        """Sends and receives a handoff and injects its fault.

        Raises:
            Undue: the handoff ended in a way that its fault does not explain.
            TransferRefused, ServiceGone: raised by the services' clients.
        """
        fault, source = handoff.fault, handoff.source
        handoff_id, num_layers = handoff.handoff_id, LAYOUT.num_layers
        sender, receiver = handoff.sender.worker, handoff.receiver.worker
        # Layers filled before the receiver drops the handoff; -1: dropped before the handoff opens.
        drop_at = source.randrange(-1, num_layers + 1) if fault is Fault.DROPPED else None
        if drop_at == -1:
            receiver.client.drop(handoff_id)
        handoff.offset = await sender.client.open_send(
            handoff_id,
            receiver.client.address,
            handoff.num_blocks,
            handoff.num_blocks * LAYOUT.block_size_tokens,
            LIMITS["open_timeout_s"],
        )
        if fault is Fault.ABORTED:
            await handoff.fill(source.randrange(num_layers + 1))
            source.choice((sender.client, sender.port)).abort_send(handoff_id)
            return Outcome.ENDED
        if fault is Fault.NEVER_FILLED:
            await handoff.fill(source.randrange(num_layers))
            await self._expires(receiving)
            return Outcome.ENDED
        if drop_at is not None and drop_at >= 0:
            await handoff.fill(drop_at)
            receiver.client.drop(handoff_id)
            if drop_at == num_layers:
                await sending.sent()
                return Outcome.ENDED
        else:
            await handoff.fill(alter=fault is Fault.ALTERED)
        sent = await sending.sent()
        if fault in (Fault.DROPPED, Fault.ALTERED):
            if _committed(sent):
                raise Undue("committed")
            return Outcome.ENDED
        if not _committed(sent):
            raise Undue(f"not sent: {sent.detail}")
        self.committed_by[sent.transport] += 1
        await receiving.received(pb.HANDOFF_STATE_COMMITTED)
        return await self._take(handoff, receiving)

    async def _take(self, handoff: Handoff, receiving: Watch) -> Outcome:
        """Plays the receiving engine for a committed handoff."""
        port, handoff_id = handoff.receiver.worker.port, handoff.handoff_id
        if handoff.fault is Fault.UNWANTED:
            port.release(handoff_id, all_shards=True)
            await receiving.received(pb.HANDOFF_STATE_RELEASED)
            return Outcome.ENDED
        if handoff.fault is Fault.NEVER_LOADED:
            await self._expires(receiving)
            return Outcome.ENDED
        if handoff.fault is Fault.NEVER_RELEASED:
            if port.claim(handoff_id, 0, timeout_s=ANSWER_TIMEOUT_S) is None:
                raise Undue("could not be claimed")
            await self._expires(receiving)
            return Outcome.ENDED
        loaded = handoff.load()
        if loaded is None:
            raise Undue("could not be claimed")
        self.num_bytes_loaded += len(loaded)
        right = checksum(loaded) == handoff.digest
        return Outcome.LOADED if right else Outcome.WRONG

    async def _expires(self, receiving: Watch) -> None:
        ended = await receiving.received(pb.HANDOFF_STATE_FAILED)
        if ended.reason != pb.REFUSAL_REASON_EXPIRED:
            raise Undue(f"did not expire: {ended.detail}")

    async def _settle(self, incarnation: Incarnation) -> None:
        """Waits until a service holds nothing.

        This polls, because the end of an aborted send's linger time sends no event.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            held = await incarnation.worker.client.stats()
            used = held.send_bytes_used + held.receive_bytes_used
            if used + held.num_sends + held.num_receives == 0:
                return
            if time.monotonic() > deadline:
                self.left.append(
                    f"worker {incarnation.place}: {held.send_bytes_used} bytes of "
                    f"{held.num_sends} sends, {held.receive_bytes_used} of {held.num_receives} "
                    "receives"
                )
                return
            await asyncio.sleep(0.1)

    def _look_for_remains(self) -> None:
        for each in self.everyone:
            if each.worker.segment_path.exists():
                self.left.append(str(each.worker.segment_path))
            if psutil.pid_exists(each.worker.client.pid):
                self.left.append(f"process {each.worker.client.pid}")
        self.left += [str(path) for path in self._directory.iterdir()]


def _last_states(sending: Watch, receiving: Watch) -> str:
    """Returns the last states of a handoff at both services, in one line."""
    states = []
    if (sent := sending.send) is not None:
        states.append(f"sender: {pb.LocalSendState.State.Name(sent.state)} {sent.detail}")
    if (received := receiving.receive) is not None:
        states.append(f"receiver: {pb.HandoffState.Name(received.state)} {received.detail}")
    return "; ".join(states) or "no state was reported"


def _committed(sent: pb.LocalSendState) -> bool:
    return sent.state == pb.LocalSendState.STATE_COMMITTED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handoffs", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=8, help="number of workers to kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--growth-mib",
        type=float,
        default=8.0,
        help="largest growth of a service's memory after the warm-up; needs 12,000 handoffs",
    )
    parser.add_argument("--quick", action="store_true", help="1,000 handoffs, two kills")
    parser.add_argument("--json", type=Path, default=Path("bench/results/soak.json"))
    arguments = parser.parse_args()
    interrupts.on_sigterm()
    num_handoffs = 1000 if arguments.quick else arguments.handoffs
    num_kills = 2 if arguments.quick else arguments.kills
    # gRPC would log every broken connection to a killed service.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        soak = Soak(Path(name), num_handoffs, num_kills, arguments.seed)
        asyncio.run(soak.run())
    wall_s = time.monotonic() - started
    goals = soak_report.goals_of(soak, arguments.growth_mib)
    results = soak_report.figures(soak, wall_s, goals)
    stats.save(results, arguments.json)
    soak_report.show(results)
    stats.print_goals(goals)
    print(f"{wall_s:.0f} s; figures in {arguments.json}")
    return 0 if all(one.reached for one in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
