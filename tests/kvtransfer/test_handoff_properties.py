"""Senders and receivers under every fault, in every order, on a virtual clock.

The processes of a worker reach its transfer service at once, or each with a delay of its own.

Whatever happens, a load returns the bytes that the prefill wrote last, or the handoff fails at both
ends. In the end no staging is in use.
"""

import itertools
import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kvtransfer import frames
from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.service.receive_state import ReceiveState
from baton.kvtransfer.service.send_state import Ended
from tests.kvtransfer.simulated_decode import RECEIVE_BLOCKS
from tests.kvtransfer.simulated_network import World
from tests.kvtransfer.simulated_prefill import Send
from tests.kvtransfer.simulated_streams import Stream

# Seconds that are enough for every timeout, one after the other.
MAX_DRAIN_S = 100.0
# More deadlines than all handoffs of a test have.
MAX_DRAIN_ROUNDS = 1000
TRANSPORTS = [
    ["shm", "grpc"],
    ["shm", "grpc"],
    ["grpc"],
    ["gloo", "grpc"],
    ["gloo", "shm", "grpc"],
]
DISORDERS = ["drop", "duplicate", "swap", "repeat later", "misroute"]
KINDS = [FrameKind.OPEN, FrameKind.DATA, FrameKind.DATA, FrameKind.REFERENCE, FrameKind.COMMIT]
PICKS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


class HandoffMachine(RuleBasedStateMachine):
    """Two prefill and two decode workers. Rules act as engines, coordinator, network and time."""

    world: World | None = None

    @initialize(
        num_shards=st.sampled_from([1, 2]),
        num_replicas=st.sampled_from([1, 2]),
        prefill=st.lists(st.sampled_from(TRANSPORTS), min_size=2, max_size=2),
        decode=st.lists(st.sampled_from(TRANSPORTS), min_size=2, max_size=2),
        batch_bytes=st.sampled_from([1, 1000, 2**20]),
        is_calm=st.sampled_from([False, False, True]),
        has_quick_sockets=st.booleans(),
        has_slow_reads=st.booleans(),
        first=st.lists(st.tuples(*[st.integers(0, 1)] * 2, st.integers(1, 3), st.booleans())),
    )
    def starts(
        self,
        num_shards,
        num_replicas,
        prefill,
        decode,
        batch_bytes,
        is_calm,
        has_quick_sockets,
        has_slow_reads,
        first,
    ):
        """In a calm world there are no faults and no time passes, so every handoff must arrive.

        Slow reads end only in the rules about reads, and at the end.
        """
        self.is_calm = is_calm
        self.world = World(
            num_shards,
            prefill,
            decode,
            batch_bytes,
            num_replicas,
            has_quick_sockets=has_quick_sockets,
        )
        for decode in self.world.decodes:
            decode.puller.is_slow = has_slow_reads
        self.sends: list[Send] = []
        self.ids = (number.to_bytes(16, "big") for number in itertools.count(1))
        for source, target, num_blocks, fills in first:
            self.opens(source, target, num_blocks, 4.0, [], fills)

    # ---- The coordinator and the engines.

    @rule(
        prefill=st.integers(0, 1),
        decode=st.integers(0, 1),
        num_blocks=st.sampled_from([1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5]),
        wait_s=st.sampled_from([0.0, 1.0, 4.0, 4.0]),
        picks=PICKS,
        fills=st.booleans(),
    )
    def opens(self, prefill, decode, num_blocks, wait_s, picks, fills):
        target = self.world.decodes[decode]
        send = self.world.prefills[prefill].open(next(self.ids), target, num_blocks, wait_s)
        if send is not None:
            send.wanted = num_blocks <= RECEIVE_BLOCKS
            self.sends.append(send)
            self.moves(picks)
            if fills:
                send.source.fill_all(send)

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def shrinks(self, data, num_blocks):
        send = data.draw(st.sampled_from(self.under_way()))
        send.source.shrink(send, num_blocks)

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), counts=st.tuples(*[st.integers(0, 4)] * 2), apart=st.booleans())
    def fills(self, data, counts, apart):
        send = data.draw(st.sampled_from(self.under_way()))
        for shard in range(len(send.progress)):
            send.source.fill(send, shard, counts[shard], last_apart=apart)

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), picks=PICKS)
    def fills_all(self, data, picks):
        send = data.draw(st.sampled_from(self.under_way()))
        send.source.fill_all(send)
        self.moves(picks)

    @precondition(lambda self: self.sends)
    @rule(
        data=st.data(),
        by=st.sampled_from(["sender", "writer", "receiver", "engine"]),
    )
    def is_cancelled(self, data, by):
        send = data.draw(st.sampled_from(self.under_way() * 4 + self.sends))
        send.wanted = False
        if by == "sender" and not self.is_calm:
            send.source.abort(send)
        elif by == "writer":
            send.source.give_up(send)
        elif by == "receiver":
            send.target.drop(send.handoff_id)
        elif by == "engine":
            send.target.release(send.handoff_id, 0, all_shards=True)

    @precondition(lambda self: self.received())
    @rule(data=st.data(), shards=st.sampled_from([[0], [1], [0, 1, 2]]))
    def claims(self, data, shards):
        """Claims a handoff in any state; a claim before the commit is refused."""
        decode, handoff_id = data.draw(st.sampled_from(self.received()))
        for shard in shards:
            decode.claim(handoff_id, shard)

    @precondition(lambda self: self.grants())
    @rule(data=st.data())
    def copies(self, data):
        """Loads a claimed part, perhaps long after the claim."""
        decode, grant, shard = data.draw(st.sampled_from(self.grants()))
        decode.load(grant, shard)

    # ---- The network and time.

    @precondition(lambda self: self.world.steps())
    @rule(picks=PICKS)
    def moves(self, picks):
        """Delivers some of the messages under way; the others are delayed."""
        for pick in picks:
            if steps := self.world.steps():
                steps[pick % len(steps)]()

    @precondition(lambda self: self.world.steps())
    @rule()
    def settles(self):
        self.world.settle()

    @precondition(lambda self: not self.is_calm and self.world.next_deadline() is not None)
    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, None]))
    def time_passes(self, seconds):
        """Advances the clock by some seconds, or to the next deadline."""
        world, deadline = self.world, self.world.next_deadline()
        if seconds is not None:
            world.advance(world.now + seconds)
        elif deadline is not None:
            world.advance(deadline)

    # ---- Faults.

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def alters(self, data, kind):
        """Alters the next message to a receiver that has a frame of this kind."""
        if (found := self.next_message(data, kind)) is None:
            return
        queue, at = found
        message = queue[at]
        # Often in the header, or in a reference's offset.
        head = st.integers(0, min(len(message), frames.HEADER_BYTES + 8) - 1)
        where = data.draw(head | st.integers(0, len(message) - 1))
        flipped = bytes([message[where] ^ data.draw(st.sampled_from([1, 2, 64, 255]))])
        rest = data.draw(st.sampled_from([flipped + message[where + 1 :], b""]))
        queue[at] = message[:where] + rest

    @precondition(lambda self: not self.is_calm and self.under_way())
    @rule(data=st.data(), kind=st.sampled_from(KINDS), fault=st.sampled_from(DISORDERS))
    def misplaces(self, data, kind, fault):
        if (found := self.next_message(data, kind)) is None:
            return
        queue, at = found
        if fault == "misroute":
            to = data.draw(st.sampled_from(self.queues()))
            to.insert(data.draw(st.integers(0, num_messages(to))), queue[at])
        else:
            misplace(queue, at, fault)

    @precondition(lambda self: not self.is_calm and self.replies())
    @rule(data=st.data(), fault=st.sampled_from(DISORDERS[:-1]))
    def spoils_a_reply(self, data, fault):
        queue = data.draw(st.sampled_from(self.replies()))
        misplace(queue, data.draw(st.integers(0, num_messages(queue) - 1)), fault)

    @rule(decode=st.integers(0, 1))
    def reads_change_their_pace(self, decode):
        puller = self.world.decodes[decode].puller
        puller.is_slow = not puller.is_slow

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), event=st.sampled_from(["fails", "fails", "dropped", "cut", "late"]))
    def reads_are_under_way_when(self, data, event):
        """One of a handoff's reads fails, or the handoff ends, while its other reads go on."""
        send = data.draw(st.sampled_from(self.under_way()))
        puller = send.target.puller
        puller.is_slow = True
        send.source.fill_all(send)
        self.world.settle()
        if event == "fails" and puller.under_way:
            puller.fail(data.draw(st.sampled_from(sorted(puller.under_way))))
        elif event == "dropped":
            send.wanted = False
            send.target.drop(send.handoff_id)
        elif event == "cut" and not self.is_calm:
            for stream in self.world.streams:
                if stream.attempt is send:
                    stream.cut()
        elif event == "late" and not self.is_calm:
            self.time_passes(None)
        self.world.settle()

    @precondition(lambda self: self.pulls())
    @rule(data=st.data())
    def reads_end(self, data):
        puller, serial = data.draw(st.sampled_from(self.pulls()))
        puller.land(serial)

    @precondition(lambda self: self.pulls())
    @rule(data=st.data(), fault=st.sampled_from(["tear", "fail", "stick", "repeat"]))
    def spoils_a_read(self, data, fault):
        """A read fails, is seen half done, sticks until the end, or its end is reported twice."""
        puller, serial = data.draw(st.sampled_from(self.pulls()))
        if fault == "tear":
            puller.tear(serial)
        elif fault == "fail":
            puller.fail(serial)
        elif fault == "stick" and not self.is_calm:
            puller.stuck.add(serial)
        elif fault == "repeat":
            puller.repeat()

    @precondition(lambda self: self.connections())
    @rule(data=st.data(), keep=st.tuples(st.integers(0, 3), st.integers(0, 1)), both=st.booleans())
    def breaks(self, data, keep, both):
        """Breaks a stream or a worker's service; some messages under way still arrive.

        With `both`, the sender and the receiver of the same worker restart: a worker that changed
        its role may still have handoffs of both.
        """
        victim = data.draw(st.sampled_from(self.connections()))
        if isinstance(victim, Stream):
            victim.cut(*keep)
        else:
            twin = self.world.twin(victim)
            self.world.restart(victim, keep[0])
            if both:
                self.world.restart(twin, keep[0])

    # ---- Invariants, and checks at the end.

    @invariant()
    def intact(self):
        for node in self.world.nodes if self.world else []:
            node.check()

    def teardown(self):
        if self.world is None:
            return
        for decode in self.world.decodes:
            decode.puller.is_slow = False
        self.goes_on_without_faults()
        if self.is_calm:
            # Half-received handoffs never block each other, and a failed read costs no handoff.
            for send in self.sends:
                loads = send.target.loaded[send.handoff_id]
                assert not send.wanted or (was_committed(send) and loads == len(send.progress)), (
                    send
                )
        until = self.world.now + MAX_DRAIN_S
        for _ in range(MAX_DRAIN_ROUNDS):
            if (deadline := self.world.next_deadline()) is None:
                break
            assert deadline <= until
            # An open that arrives at its own deadline expires in the next round at the same time.
            self.world.advance(max(deadline, self.world.now))
            self.goes_on_without_faults()
        assert self.world.next_deadline() is None
        # Only reads that are stuck keep staging from its next user, for as long as they last.
        for decode in self.world.decodes:
            assert decode.receiver.num_live == 0
            used = decode.receiver.arena_statistics().num_extents
            assert (used > 0) == bool(decode.puller.under_way)
            decode.puller.release()
        self.world.settle()
        self.is_empty()
        for prefill, decode in itertools.product(self.world.prefills, self.world.decodes):
            send = prefill.open(next(self.ids), decode, RECEIVE_BLOCKS, 4.0)
            self.sends.append(send)
            self.goes_on_without_faults()
            assert was_committed(send)
            assert decode.loaded[send.handoff_id] == len(send.progress)
        self.is_empty()

    def goes_on_without_faults(self):
        """Lets every worker finish its work, without time passing."""
        before = None
        while before != (before := self.progress()):
            self.world.settle()
            for send in self.sends:
                if send.source.alive:
                    send.source.fill_all(send)
            self.world.settle()
            for decode in self.world.decodes:
                decode.load_all()
            self.intact()

    def progress(self):
        written = sum(sum(send.progress) + len(send.ended) for send in self.sends)
        return written, sum(decode.loaded.total() for decode in self.world.decodes)

    def is_empty(self):
        assert self.world.streams == []
        assert self.world.next_deadline() is None
        for machine in self.world.machines:
            machine.check_integrity()
            assert machine.num_live == machine.num_waiting == 0
            assert machine.arena_statistics().used_bytes == 0
        for decode in self.world.decodes:
            assert set(decode.states.values()) <= {ReceiveState.RELEASED, ReceiveState.FAILED}
        for send in self.sends:
            # Each end is reported once, unless the sender has died.
            assert send.ended or send.aborted or not send.source.alive, send

    def received(self):
        """Returns known handoffs of all receivers, mostly those that can be loaded."""
        known = [
            (decode, handoff_id, state in (ReceiveState.COMMITTED, ReceiveState.CLAIMED))
            for decode in self.world.decodes
            for handoff_id, state in decode.states.items()
        ]
        return [each[:2] for each in known for _ in range(5 if each[2] else 1)]

    def grants(self):
        return [(decode, *grant) for decode in self.world.decodes for grant in decode.grants]

    def next_message(self, data, kind):
        """Runs until a message has a frame of this kind; returns its queue and index, or None."""
        send = data.draw(st.sampled_from(self.under_way()))
        send.source.fill_all(send)
        while not (found := self.messages(kind)) and (steps := self.world.steps()):
            for step in steps:
                step()
        return data.draw(st.sampled_from(found)) if found else None

    def messages(self, kind):
        return [
            (queue, at)
            for queue in self.queues()
            for at, message in enumerate(queue)
            if message is not None and kind in kinds_of(message)
        ]

    def queues(self):
        """Returns queues of messages to receivers that may be spoilt: in a calm world none."""
        return [] if self.is_calm else [each.up for each in self.world.streams]

    def replies(self):
        return [stream.down for stream in self.world.streams if any(stream.down)]

    def connections(self):
        if self.is_calm:
            return []
        streams = [stream for stream in self.world.streams if not stream.is_cut]
        return streams * 2 + self.world.nodes

    def pulls(self):
        """Returns the reads of living receivers that have not ended."""
        return [
            (decode.puller, serial)
            for decode in self.world.decodes
            for serial in decode.puller.under_way
        ]

    def under_way(self):
        return [send for send in self.sends if send.source.alive and not send.ended]


def kinds_of(message):
    try:
        return {frame.kind for frame in frames.decode(message)}
    except MalformedFrame:
        return set()


def num_messages(queue):
    """Returns the number of messages in a queue, without the end marker."""
    return len([each for each in queue if each is not None])


def misplace(queue, at, fault):
    match fault:
        case "drop":
            del queue[at]
        case "duplicate":
            queue.insert(at, queue[at])
        case "repeat later":
            queue.insert(num_messages(queue), queue[at])
        case "swap" if at + 1 < num_messages(queue):
            queue[at], queue[at + 1] = queue[at + 1], queue[at]


def was_committed(send):
    return bool(send.ended) and isinstance(send.ended[0], Ended) and send.ended[0].committed


HandoffMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("BATON_SEEDS", 300)),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
)
TestHandoff = HandoffMachine.TestCase
