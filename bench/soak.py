"""Handoffs by the thousand, with faults: right bytes, nothing left behind, no growth.

`python -m baton.bench.soak --help`. Four workers with real transfer services, each sending to and
receiving from every other, do not all have the same transports in common: every transport moves
bytes all the time. Two of the workers are killed now and then and replaced by new ones. A handoff's
bytes follow from its id and from how often its prefill was restarted, so that every load is
compared with what it must be. Ends with exit code 1 when anything is wrong.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from baton.bench import interrupts, stats
from baton.bench.stats import Reach
from baton.bench.transfer_workers import Watch, Worker
from baton.kvtransfer.control import (
    FIRST_EPOCH,
    ServiceGone,
    TransferRefused,
    checksum,
    filled_frame,
    split_blocks,
)
from baton.kvtransfer.layout import KvLayout
from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb

MIB = 2**20
# 6 KiB per block of 4 tokens.
LAYOUT = KvLayout("soak", "soak", "float32", 3, 2, 8, 4, 1024, "heads,tokens,content", tp_size=2)
# 6 KiB to 3 MiB.
MAX_BLOCKS = 512
FRAME_BYTES = 128 * 1024
LIMITS = {
    "send_bytes": 96 * MIB,
    "receive_bytes": 96 * MIB,
    "open_timeout_s": 10.0,
    "idle_timeout_s": 5.0,
    "commit_ttl_s": 5.0,
    "claim_timeout_s": 5.0,
}
# Of the workers' places: half of their pairs share memory, a third have only gRPC in common.
TRANSPORTS = (
    ["shm", "gloo", "grpc"],
    ["shm", "grpc"],
    ["gloo", "grpc"],
    ["shm", "grpc"],
)
# Places whose workers are killed, in turn.
MORTAL = (2, 3)
CONCURRENCY = 64
# Of an engine, for its service's answer.
ANSWER_TIMEOUT_S = 10.0
# Longer than any wait that a service allows itself: a handoff that takes longer hangs.
HANDOFF_TIMEOUT_S = 40.0
SETTLE_TIMEOUT_S = 20.0
# Handoffs.
SAMPLE_EVERY = 1000
# Of a worker's memory: these do not count; as many after them are compared with its last.
WARM_UP_SAMPLES = 4


class Fault(Enum):
    """What goes wrong with a handoff; the values are their shares of all."""

    NONE = "none"
    RESTARTED = "prefill restarted"
    ABORTED = "sender aborts"
    DROPPED = "receiver drops"
    UNWANTED = "released without a load"
    ALTERED = "bytes altered"
    NEVER_FILLED = "never finished"
    NEVER_LOADED = "never loaded"
    NEVER_RELEASED = "never released"


class Outcome(Enum):
    """How a handoff ended."""

    LOADED = "loaded, right"
    WRONG = "loaded, WRONG"
    ENDED = "ended unloaded"
    NO_ROOM = "no room"
    LOST = "worker killed"
    UNDUE = "failed UNDULY"
    HUNG = "HUNG"


SHARES = {
    Fault.NONE: 61,
    Fault.RESTARTED: 9,
    Fault.ABORTED: 9,
    Fault.DROPPED: 8,
    Fault.UNWANTED: 6,
    Fault.ALTERED: 4,
    Fault.NEVER_FILLED: 1,
    Fault.NEVER_LOADED: 1,
    Fault.NEVER_RELEASED: 1,
}


@dataclass(slots=True)
class Incarnation:
    """One worker from its start to its end.

    Attributes:
        killed: also while that is about to happen.
        private_bytes: samples of its service's memory.
        num_files: the same of its open files.
        num_handoffs: that it takes part in; `idle` is set when there are none.
    """

    place: int
    worker: Worker
    killed: bool = False
    private_bytes: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)
    num_handoffs: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def taking_part(self, change: int) -> None:
        """A handoff from or to it begins (1) or has ended (-1)."""
        self.num_handoffs += change
        if self.num_handoffs:
            self.idle.clear()
        else:
            self.idle.set()

    def growth_bytes(self) -> float | None:
        """From after the warm-up to the last; None of one that did not live long enough."""
        steady = self.private_bytes[WARM_UP_SAMPLES:]
        if len(steady) < 2 * WARM_UP_SAMPLES:
            return None
        return stats.median(steady[-WARM_UP_SAMPLES:]) - stats.median(steady[:WARM_UP_SAMPLES])


class Undue(Exception):
    """A handoff ended as nothing that was done to it explains."""


@dataclass(slots=True)
class Handoff:
    """One handoff and what may happen to it; its choices follow from its id.

    Attributes:
        digest: of what the engine has written last, all of it.
    """

    handoff_id: bytes
    fault: Fault
    sender: Incarnation
    receiver: Incarnation
    num_blocks: int
    source: random.Random
    epoch: int = FIRST_EPOCH
    offset: int = -1
    digest: int = 0

    @property
    def killed(self) -> bool:
        return self.sender.killed or self.receiver.killed

    def __str__(self) -> str:
        pair = f"worker {self.sender.place} to {self.receiver.place}"
        return f"{self.handoff_id.hex()}, {pair}, {self.fault.value}"

    def content(self) -> bytes:
        """What the engine writes in this epoch."""
        seed = self.handoff_id + self.epoch.to_bytes(4, "little")
        return random.Random(seed).randbytes(LAYOUT.handoff_bytes(self.num_blocks))

    async def fill(self, num_layers: int = LAYOUT.num_layers, *, alter: bool = False) -> None:
        """Writes layer after layer of every rank, and tells of them; others run in between."""
        port, data = self.sender.worker.port, self.content()
        self.digest = checksum(data)
        altered = self.source.randrange(num_layers) if alter else -1
        for layer in range(num_layers):
            for rank in range(LAYOUT.tp_size):
                filled = []
                for first, count in split_blocks(
                    0, self.num_blocks, LAYOUT.block_bytes, FRAME_BYTES
                ):
                    start = LAYOUT.offset(rank, layer, first, self.num_blocks)
                    end = start + count * LAYOUT.block_bytes
                    port.memory[self.offset + start : self.offset + end] = data[start:end]
                    last = layer == LAYOUT.num_layers - 1 and first + count == self.num_blocks
                    filled.append(
                        filled_frame(
                            self.handoff_id, self.epoch, rank, layer, first, count,
                            data[start:end], last=last,
                        )
                    )  # fmt: skip
                if layer == altered and rank == 0:
                    filled[0].checksum ^= 1
                port.send_frames(filled)
            await asyncio.sleep(0)

    def load(self) -> bytes | None:
        """Every rank's part, claimed, copied and released; None when it cannot be claimed."""
        port, parts = self.receiver.worker.port, []
        for rank in range(LAYOUT.tp_size):
            claim = port.claim(self.handoff_id, rank, timeout_s=ANSWER_TIMEOUT_S)
            if claim is None:
                return None
            size = LAYOUT.shard_bytes(claim.num_blocks)
            parts.append(bytes(port.memory[claim.offset : claim.offset + size]))
            port.release(self.handoff_id, rank)
        return b"".join(parts)


class Soak:
    """The workers, and what became of the handoffs."""

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
        """Everything, from the services' start to their end."""
        try:
            await asyncio.gather(*(self._start(place) for place in range(len(TRANSPORTS))))
            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(self._hand_over_again_and_again())
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
        """Kills a worker's service; a new worker takes its place."""
        killed = self._places[place]
        if killed is None:
            return
        killed.killed, self._places[place] = True, None
        os.kill(killed.worker.client.pid, signal.SIGKILL)
        await killed.worker.client.gone.wait()
        await self._start(place)
        # Until then its engine still writes to its segment, and reads from it.
        await killed.idle.wait()
        await killed.worker.close()

    async def _hand_over_again_and_again(self) -> None:
        while self._num_begun < self._num_handoffs:
            self._num_begun += 1
            if self._num_begun % self._kill_every == 0:
                place = MORTAL[self._num_begun // self._kill_every % len(MORTAL)]
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
                self.undue.append(f"{handoff}: {error or 'hung'}; {_said(sending, receiving)}")
                return Outcome.HUNG if hung else Outcome.UNDUE
            finally:
                self.num_fallbacks += sending.send.num_fallbacks if sending.send else 0
                # As a worker does when the request of a send that failed is over.
                if sending.send is None or not _committed(sending.send):
                    sender.client.abort_send(handoff.handoff_id)

    async def _play(self, handoff: Handoff, sending: Watch, receiving: Watch) -> Outcome:
        fault, source = handoff.fault, handoff.source
        handoff_id, num_layers = handoff.handoff_id, LAYOUT.num_layers
        sender, receiver = handoff.sender.worker, handoff.receiver.worker
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
        if fault is Fault.RESTARTED:
            for _ in range(source.randint(1, 3)):
                await handoff.fill(source.randrange(num_layers))
                handoff.epoch += 1
                restarted = sender.port.restart_send(
                    handoff_id, handoff.epoch, timeout_s=ANSWER_TIMEOUT_S
                )
                if not restarted:
                    raise Undue("could not be restarted")
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
        return await self._committed(handoff, receiving)

    async def _committed(self, handoff: Handoff, receiving: Watch) -> Outcome:
        """How it goes on at the receiving engine."""
        port, handoff_id = handoff.receiver.worker.port, handoff.handoff_id
        if handoff.fault is Fault.UNWANTED:
            port.release(handoff_id, all_ranks=True)
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
        """Waits until a service holds nothing; the linger of an aborted send has no event."""
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


def _said(sending: Watch, receiving: Watch) -> str:
    """What the services said last of a handoff, in one line."""
    states = []
    if (sent := sending.send) is not None:
        states.append(f"sender: {pb.LocalSendState.State.Name(sent.state)} {sent.detail}")
    if (received := receiving.receive) is not None:
        states.append(f"receiver: {pb.HandoffState.Name(received.state)} {received.detail}")
    return "; ".join(states) or "the services said nothing"


def _committed(sent: pb.LocalSendState) -> bool:
    return sent.state == pb.LocalSendState.STATE_COMMITTED


def reaches_of(soak: Soak, growth_mib: float) -> list[Reach]:
    grown = [growth for each in soak.everyone if (growth := each.growth_bytes()) is not None]
    offered = {name for names in TRANSPORTS for name in names}
    reaches = [
        Reach("wrong digests", soak.count(Outcome.WRONG), 0),
        Reach("handoffs that hung", soak.count(Outcome.HUNG), 0),
        Reach("handoffs that failed unduly", soak.count(Outcome.UNDUE), 0),
        Reach("things left behind", len(soak.left), 0),
        Reach("transports that moved nothing", len(offered - set(soak.committed_by)), 0),
    ]
    if grown:
        worst_mib = stats.worst(grown) / MIB
        reaches.append(Reach("largest growth after warm-up", worst_mib, growth_mib, " MiB"))
    return reaches


def figures(soak: Soak, wall_s: float, reaches: Sequence[Reach]) -> dict[str, Any]:
    return {
        "num_handoffs": soak.outcomes.total(),
        "wall_s": wall_s,
        "num_bytes_loaded": soak.num_bytes_loaded,
        "outcomes": {
            fault.value: {
                outcome.value: soak.outcomes[fault, outcome]
                for outcome in Outcome
                if soak.outcomes[fault, outcome]
            }
            for fault in Fault
        },
        "committed_by": dict(soak.committed_by),
        "num_fallbacks": soak.num_fallbacks,
        "num_killed": sum(each.killed for each in soak.everyone),
        "workers": [
            {
                "place": each.place,
                "transports": TRANSPORTS[each.place],
                "killed": each.killed,
                "private_bytes": each.private_bytes,
                "num_files": each.num_files,
                "growth_bytes": each.growth_bytes(),
            }
            for each in soak.everyone
        ],
        "undue": soak.undue,
        "left": soak.left,
        "reaches": [asdict(one) | {"reached": one.reached} for one in reaches],
    }


def show(results: dict[str, Any]) -> None:
    seen = [each for each in Outcome if any(each.value in n for n in results["outcomes"].values())]
    rows = [
        [fault, *(str(counts.get(outcome.value, "")) for outcome in seen)]
        for fault, counts in results["outcomes"].items()
    ]
    moved = ", ".join(f"{name or '?'} {n}" for name, n in results["committed_by"].items())
    title = (
        f"{results['num_handoffs']} handoffs in {results['wall_s']:.0f} s, "
        f"{results['num_killed']} workers killed; committed by {moved}; "
        f"{results['num_fallbacks']} fallbacks"
    )
    stats.print_table(title, ["fault", *(each.value for each in seen)], rows)
    rows = []
    for each in results["workers"]:
        if not each["private_bytes"]:
            continue
        memory = [each["private_bytes"][0], max(each["private_bytes"]), each["private_bytes"][-1]]
        growth = each["growth_bytes"]
        rows.append(
            [
                f"{each['place']}: {', '.join(each['transports'])}",
                "yes" if each["killed"] else "",
                *(f"{num_bytes / MIB:.1f}" for num_bytes in memory),
                "" if growth is None else f"{growth / MIB:.2f}",
                f"{each['num_files'][0]} to {each['num_files'][-1]}",
            ]
        )
    header = ["worker", "killed", "first MiB", "most", "last", "growth", "open files"]
    stats.print_table("Services' resident memory without what they map", header, rows)
    for line in [*results["undue"][:10], *results["left"][:10]]:
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handoffs", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=8, help="workers that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--growth-mib",
        type=float,
        default=8.0,
        help="of a service's memory after the warm-up, judged from 12,000 handoffs on",
    )
    parser.add_argument("--quick", action="store_true", help="1,000 handoffs, two kills")
    parser.add_argument("--json", type=Path, default=Path("bench/results/soak.json"))
    arguments = parser.parse_args()
    interrupts.on_sigterm()
    num_handoffs = 1000 if arguments.quick else arguments.handoffs
    num_kills = 2 if arguments.quick else arguments.kills
    # gRPC's own account of connections to killed services.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        soak = Soak(Path(name), num_handoffs, num_kills, arguments.seed)
        asyncio.run(soak.run())
    wall_s = time.monotonic() - started
    reaches = reaches_of(soak, arguments.growth_mib)
    results = figures(soak, wall_s, reaches)
    stats.save(results, arguments.json)
    show(results)
    stats.print_reaches(reaches)
    print(f"{wall_s:.0f} s; figures in {arguments.json}")
    return 0 if all(one.reached for one in reaches) else 1


if __name__ == "__main__":
    sys.exit(main())
