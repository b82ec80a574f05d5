"""A small engine with the connector's real halves; random rules or single tests drive it."""

from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from baton.kvtransfer import frames
from baton.kvtransfer.connector.handoffs.handoff_scheduler import HandoffScheduler
from baton.kvtransfer.connector.handoffs.handoff_step import LoadReport
from baton.kvtransfer.connector.handoffs.rank_handoffs import RankHandoffs
from baton.kvtransfer.connector.request_params import encode
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from tests.kvtransfer.small_engine import (
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    POISON,
    REPLICAS,
    SHARDS,
    SIZE,
    TOKEN_BYTES,
    Pool,
    Request,
    Service,
    block_content,
    content,
    flipped,
    messages_of,
)

NUM_OUTPUTS = 6
# Bytes of a frame, and more bytes than staging has.
BLOCK_BYTES, ALL_BYTES = SIZE * TOKEN_BYTES, 10**6
# Faults of a first epoch that only its commit reveals.
FAULTS = ("foreign bytes", "corrupted commit")


@dataclass(eq=False)
class Coming:
    """A handoff on its way to the engine.

    Attributes:
        messages: The messages that have not been delivered, each with the stream that carries it.
        is_submitted: True once the engine has got the request.
    """

    handoff_id: bytes
    messages: list[tuple[int, bytes]]
    request: Request
    is_submitted: bool = False


class Later(Executor):
    """Runs what it was given when it is told to."""

    def __init__(self):
        self._given = []

    def submit(self, call, /, *args):
        self._given.append((future := Future(), call, args))
        return future

    def run(self):
        given, self._given = self._given, []
        for future, call, args in given:
            future.set_result(call(*args))


@dataclass
class Done:
    """Reports of the ranks after a step.

    Attributes:
        invalid: Blocks that the step's own loads failed to fill.
        report: The failed loads.
        loaded: IDs of the requests whose loads have ended in all ranks.
    """

    invalid: set[int]
    report: LoadReport
    loaded: set[str]


def as_scheduled(requests, *, preempted=(), most_tokens=1000):
    """Returns vLLM's SchedulerOutput for a step.

    Args:
        requests: Requests that run in the step.
        preempted: IDs of requests that this schedule has preempted.
        most_tokens: Most tokens of one request that the step computes.
    """
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        num_scheduled_tokens={
            one.request_id: max(1, min(most_tokens, one.num_tokens - one.num_computed))
            for one in requests
        },
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], resumed_req_ids=()
        ),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=one.request_id, num_computed_tokens=one.num_computed)
            for one in requests
        ],
        scheduled_spec_decode_tokens={},
        kv_cache_block_copies=None,
        kv_connector_block_state=SimpleNamespace(
            get_block_ids={
                one.request_id: ([block.block_id for block in one.blocks],) for one in requests
            }.__getitem__
        ),
    )


class DrivenEngine:
    """An engine whose events and steps its caller chooses.

    Args:
        is_calm: No bytes are altered, no lease expires, and no cancel comes between a step's
            schedule and its work in the ranks, nor while a request waits for its load: a rank that
            copies other loads first has not claimed the handoff yet. Then no load may fail.
        verifies_late: As on GPUs: the model is launched before the loads are verified, and
            loads that requests wait for are copied beside the steps. Otherwise each step copies
            a part of them.
        first_yields: The first running request is preempted when blocks run short. With
            priorities the victim may have got blocks in the same schedule.
        requests_wait: Requests wait, with their blocks, until the ranks have loaded them.
            Otherwise the step that runs a request loads it, as for caches with states.
    """

    def __init__(self, is_calm, *, verifies_late=False, first_yields=False, requests_wait=False):
        self.service, self.pool = Service(), Pool()
        self.half = HandoffScheduler(self.service, LAYOUT)
        self.half.bind(self.pool)
        self.caches = []
        self.ranks = []
        for number in range(LAYOUT.tp_size):
            rank = RankHandoffs("", self.service, number, LAYOUT)
            shape = (NUM_BLOCKS, 1, SIZE, TOKEN_BYTES)
            cache = {f"{layer}": torch.zeros(shape, dtype=torch.uint8) for layer in range(LAYERS)}
            rank.register(cache)
            rank._loads._clock = lambda: self.service.now
            self.caches.append([cache[f"{layer}"] for layer in range(LAYERS)])
            self.ranks.append(rank)
        self.coming: list[Coming] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        # Requests that wait for their loads and hold blocks; how many ranks have loaded them, by
        # request ID; those that all ranks have loaded; those that ended before.
        self.loading: list[Request] = []
        self.num_loaded: dict[str, int] = {}
        self.loaded: set[str] = set()
        self.ending: list[Request] = []
        self.failing: set[str] = set()
        self.later = Later()
        self.num_handoffs = self.num_streams = 0
        self.is_calm, self.first_yields = is_calm, first_yields
        for rank in self.ranks:
            rank._copies.finishes_at_once = not verifies_late
            if requests_wait:
                rank._loads._threads = self.later
        self.half.requests_wait = requests_wait

    # ---- Handoffs and requests.

    def begin(self, length, family, skip, *, fault=None):
        """Begins a handoff whose request is not submitted yet."""
        while len(self.coming) >= 5:
            self.abort(self.coming[0])
        self.num_handoffs += 1
        number = self.num_handoffs
        handoff_id = number.to_bytes(16, "big")
        # Many prompts share the first tokens; the last ones are this prompt's own.
        prompt = [family] * (length - length // 3) + [number] * (length // 3)
        skip_blocks = min(skip, (length - 1) // SIZE)
        token = 100 + number % 100
        receive = ReceiveHandoff(handoff_id, length, 1e9, skip_blocks * SIZE)
        request = Request(f"r{number}", [*prompt, token], encode(receive=receive))
        messages = self.sent(handoff_id, prompt, skip_blocks, fault)
        self.coming.append(Coming(handoff_id, messages, request))

    def begin_fetch(self, num_blocks, num_more, skip, num_following=0, lacking=0, *, fault=None):
        """Begins a fetch, and submits requests that wait for it.

        Args:
            num_blocks: Number of blocks at the beginning of the prompt that the handoff ends with.
            num_more: Number of tokens that the request computes.
            skip: Number of these blocks that the handoff leaves out, if some are left.
            num_following: Number of other requests that wait for the fetch.
            lacking: Number of the last blocks that the holder lacks, if it has some of those that
                it should send.
            fault: Fault of the first epoch.
        """
        while len(self.coming) >= 5:
            self.abort(self.coming[0])
        self.num_handoffs += 1
        number = self.num_handoffs
        handoff_id = number.to_bytes(16, "big")
        prompt, skip_blocks = [3] * (num_blocks * SIZE), min(skip, num_blocks - 1)
        receive = ReceiveHandoff(
            handoff_id, num_blocks * SIZE, 1e9, skip_blocks * SIZE, is_fetch=True
        )
        tokens = [*prompt, *[100 + number % 100] * num_more]
        request = Request(f"r{number}", tokens, encode(receive=receive))
        num_held = max(skip_blocks + 1, num_blocks - lacking)
        messages = self.sent(handoff_id, prompt[: num_held * SIZE], skip_blocks, fault, prompt)
        self.coming.append(Coming(handoff_id, messages, request))
        for index in range(num_following):
            waits = replace(receive, num_tokens=0, skip_tokens=0)
            tokens = [*prompt, 60 + index, 100 + number % 100]
            one = Request(f"r{number}-{index}", tokens, encode(receive=waits))
            self.waiting.append(one)
            self.half.add(one)

    def sent(self, handoff_id, prompt, skip_blocks, fault, wanted=None):
        """Returns a prompt's messages; a fault adds an uncommitted epoch before the good one.

        A `wanted` prompt that is longer was opened before, in an epoch without blocks.
        """
        attempts = []
        if wanted is not None and len(wanted) > len(prompt):
            attempts.append(messages_of(handoff_id, wanted, skip_blocks)[:1])
        elif fault == "foreign bytes":
            attempts.append(
                messages_of(handoff_id, prompt, skip_blocks, alter=lambda _: SIZE * POISON)
            )
        elif fault == "corrupted commit":
            *first, last = messages_of(handoff_id, prompt, skip_blocks)
            attempts.append([*first, flipped(last)])
        epoch = 1 + len(attempts)
        # The next epoch is sent in other chunks, so its frames come in another order.
        again = messages_of(handoff_id, prompt, skip_blocks, epoch=epoch, at_once=1 + epoch)
        messages = []
        for attempt in [*attempts, again]:
            self.num_streams += 1
            messages += [(self.num_streams, message) for message in attempt]
        return messages

    def submit_plain(self, tokens):
        """Submits a request that waits for no handoff."""
        request = Request(f"plain{tokens[-1]}", tokens, {})
        self.waiting.append(request)
        self.half.add(request)
        return request

    def deliver(self, coming, count):
        now, messages = coming.messages[:count], coming.messages[count:]
        coming.messages = messages
        for stream, message in now:
            for frame in frames.decode(message):
                effects = self.service.receiver.handle_frame(stream, frame, self.service.now)
                self.service.told(effects)

    def submit(self, coming):
        """Gives the engine the request of a handoff, once."""
        if not coming.is_submitted:
            coming.is_submitted = True
            self.waiting.append(coming.request)
            self.half.add(coming.request)

    def drop(self, coming):
        self.service.told(self.service.receiver.drop(coming.handoff_id, self.service.now))

    def abort(self, coming):
        self.drop(coming)
        self.end(coming.request)
        self.coming = [one for one in self.coming if one is not coming]

    def advance(self, seconds):
        """Lets time pass in which handoffs may expire."""
        self.service.now += seconds
        self.service.told(self.service.receiver.expire(self.service.now))

    def alter_staging(self, at):
        """Overwrites the keys and values of one token in staging."""
        self.service.buffer[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES] = POISON

    def stop_or_start_service(self):
        """While the service is stopped, claims get no answer."""
        self.service.is_stopped = not self.service.is_stopped

    # ---- The engine.

    def end(self, request):
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
        elif request in self.loading:
            self.loading.remove(request)
        else:
            return
        self.half.finished(request, ([block.block_id for block in request.blocks],))
        if request.request_id in self.num_loaded:
            # The ranks still fill its blocks.
            self.ending.append(request)
        else:
            self.loaded.discard(request.request_id)
            self.pool.free_blocks(reversed(request.blocks))
        self.coming = [one for one in self.coming if one.request is not request]

    def run_step(
        self,
        meanwhile=(),
        later=(),
        num_free=NUM_BLOCKS,
        num_aborted=0,
        *,
        ahead=False,
        slow=False,
        most_bytes=ALL_BYTES,
        stream_bytes=0,
    ):
        """Makes a step as vLLM does.

        Args:
            meanwhile: Events between the schedule and the ranks' work.
            later: Events after the ranks' work.
            num_free: Free blocks that other requests leave.
            num_aborted: Number of requests of the step, from the last, that are aborted before the
                step's output is processed.
            ahead: Whether a second step is made before the first one's output is processed.
            slow: Whether only the first rank goes on with loads that requests wait for.
            most_bytes: Bytes after which a rank copies no further frame of them.
            stream_bytes: The same for loads of streams, if it is more.
        """
        others = self.pool.get_new_blocks(max(0, len(self.pool.free) - num_free))
        scheduled = self.schedule()
        steps = [(scheduled, self.half.step(as_scheduled(scheduled, preempted=self.preempted)))]
        self.happen([one for one in meanwhile if not (self.is_calm and one[0] == "drop")])
        if ahead:
            scheduled_next = self.schedule(only_waiting=True)
            steps.append((scheduled_next, self.half.step(as_scheduled(scheduled_next))))
        most = most_bytes, stream_bytes
        done = [self.work(one, work, others, slow=slow, most=most) for one, work in steps]
        for request in [*scheduled, *self.loading][::-1][:num_aborted]:
            self.end(request)
        for (one, _), said in zip(steps, done, strict=True):
            self.take_output(one, said)
        self.happen(later)
        self.pool.free_blocks(others)

    def work(self, scheduled, work, others, *, slow=False, most=(ALL_BYTES, 0)):
        """Does the ranks' work of a step; returns what they say."""
        invalid, report, loaded = set(), LoadReport(), set()
        for number, rank in enumerate(self.ranks):
            rank.begin_step(work)
            if work.loads:
                rank.load(work)
            for block in others:
                for cache in self.caches[number]:
                    cache[block.block_id] = 0x77
            self.compute(scheduled, number)
            if not work.loads:
                rank.load(work)
            rank.end_step()
            # One rank may be faster than the others.
            if not slow or not number:
                # Fetches get at least half of the usual bytes beside streams.
                assert rank.copy_waited(*most) < max(most) + most[0] // 2 + BLOCK_BYTES
                self.later.run()
            ended, failed = rank.take_ended()
            self.failing |= failed
            for request_id in ended:
                self.num_loaded[request_id] += 1
                if self.num_loaded[request_id] == len(self.ranks):
                    loaded.add(request_id)
            invalid |= rank.take_invalid_block_ids()
            report.add(rank.take_report())
        assert not (self.is_calm and (invalid or report)), "a load has failed"
        return Done(invalid, report, loaded)

    def take_output(self, scheduled, said):
        self.fail_what_has(said.invalid)
        self.half.reported(said.report)
        for block_id in self.half.distrust(said.invalid):
            self.pool.evict(self.pool.blocks[block_id])
        self.half.loaded(said.loaded)
        self.take_loaded(said.loaded)
        # Blocks that a step made ahead has filled are verified with that step's output.
        _, *following = self.half._unverified._unfinished
        unknown = {block for step in following for one in step for block in one.affected}
        for name, block in self.pool.cached.items():
            if block.block_id not in unknown:
                self.check_block(name, len(name) // SIZE - 1, block)
        self.sample(scheduled)
        gone = self.half.finish_step().gone
        for request in [one for one in self.waiting if one.request_id in gone]:
            self.end(request)

    def take_loaded(self, request_ids):
        """Takes the requests whose loads have ended in all ranks, as vLLM does."""
        for request_id in request_ids:
            del self.num_loaded[request_id]
        self.loaded |= request_ids
        for request in [one for one in self.ending if one.request_id in request_ids]:
            self.ending.remove(request)
            self.loaded.remove(request.request_id)
            self.pool.free_blocks(reversed(request.blocks))
        for request in [
            one for one in self.loading if one.request_id in self.failing & request_ids
        ]:
            self.end(request)
        self.failing -= request_ids

    def happen(self, events):
        for what, coming in events:
            if what == "drop":
                is_loading = coming.request in [*self.loading, *self.ending]
                if not (self.is_calm and is_loading):
                    self.drop(coming)
            elif what == "deliver":
                self.deliver(coming, 1000)
            else:
                self.submit(coming)

    def schedule(self, *, only_waiting=False):
        """Returns the requests of the next step; sets `preempted` to those it preempted."""
        scheduled, self.preempted = [], []
        for request in [] if only_waiting else list(self.running):
            needed = LAYOUT.num_blocks(request.num_tokens) - len(request.blocks)
            while request in self.running and needed > len(self.pool.free):
                victim = self.running[0 if self.first_yields else -1]
                self.preempt(victim)
                scheduled = [one for one in scheduled if one is not victim]
                self.preempted.append(victim.request_id)
            if request in self.running:
                request.blocks += self.pool.get_new_blocks(needed)
                self.allocated(request)
                scheduled.append(request)
        if not self.preempted:
            self.schedule_loaded(scheduled)
            self.schedule_waiting(scheduled)
        return scheduled

    def schedule_loaded(self, scheduled):
        for request in [one for one in self.loading if one.request_id in self.loaded]:
            needed = LAYOUT.num_blocks(request.num_tokens) - len(request.blocks)
            if needed > len(self.pool.free):
                break
            request.blocks += self.pool.get_new_blocks(needed)
            self.allocated(request)
            self.half.allocated(request, ([block.block_id for block in request.blocks],), 0)
            self.loading.remove(request)
            self.loaded.remove(request.request_id)
            self.running.append(request)
            scheduled.append(request)

    def preempt(self, request):
        """Takes a request's blocks; the request starts over when there is room."""
        self.running.remove(request)
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks, request.num_computed = [], 0
        self.waiting.insert(0, request)

    def schedule_waiting(self, scheduled):
        for request in list(self.waiting):
            found = []
            for name in request.block_hashes[: (request.num_tokens - 1) // SIZE]:
                if (blocks := self.pool.get_cached_block(name, [0])) is None:
                    break
                found += blocks
            num_loaded = self.half.num_loadable_tokens(request, len(found) * SIZE)
            if num_loaded is None:
                continue
            held = sum(block.ref_cnt == 0 for block in found)
            num_computed = len(found) * SIZE + num_loaded
            waits = self.half.requests_wait and num_loaded
            needed = LAYOUT.num_blocks(num_computed if waits else request.num_tokens) - len(found)
            if needed + held > len(self.pool.free):
                break
            self.pool.touch(found)
            request.blocks = found + self.pool.get_new_blocks(needed)
            request.num_computed = num_computed
            if not waits:
                self.allocated(request)
            ids = [block.block_id for block in request.blocks]
            self.half.allocated(request, (ids,), num_loaded)
            self.waiting.remove(request)
            self.coming = [one for one in self.coming if one.request is not request]
            if waits:
                self.num_loaded[request.request_id] = 0
                self.loading.append(request)
            else:
                self.running.append(request)
                scheduled.append(request)

    def allocated(self, request):
        """Caches blocks that this step will fill, before they are filled, as vLLM does."""
        num_full = request.num_tokens // SIZE
        self.pool.cache_full_blocks(request, request.blocks, 0, num_full, SIZE, 0)

    def compute(self, scheduled, rank):
        """Writes the step's keys and values; they are wrong behind wrong keys and values."""
        for request in scheduled:
            self.write(request, rank, content)
            is_right = all(
                self.is_right(request.tokens, index, block, rank)
                for index, block in enumerate(request.blocks)
            )
            if any(self.is_poisoned(block, rank) for block in request.blocks):
                self.write(request, rank, lambda *_: POISON)
            elif not is_right:
                self.write(request, rank, lambda *made: content(*made)[::-1])

    def write(self, request, rank, made):
        """Writes the keys and values of the tokens that a request computes."""
        for at in range(request.num_computed, request.num_tokens):
            block = request.blocks[at // SIZE].block_id
            for layer in range(LAYERS):
                data = bytearray(made(request.tokens[: at + 1], rank // REPLICAS, layer))
                row = torch.frombuffer(data, dtype=torch.uint8)
                self.caches[rank][layer][block, 0, at % SIZE] = row

    def fail_what_has(self, invalid):
        for request in list(self.running):
            ids = [block.block_id for block in request.blocks]
            wrong = [at for at, block_id in enumerate(ids) if block_id in invalid]
            if wrong and wrong[0] * SIZE < request.num_computed:
                for block in request.blocks[wrong[0] :]:
                    self.pool.evict(block)
                self.end(request)

    def sample(self, scheduled):
        for request in scheduled:
            if request not in self.running:
                continue
            for index, block in enumerate(request.blocks):
                self.check_block(request.tokens, index, block)
            request.num_computed = request.num_tokens
            request.num_outputs += 1
            if request.num_outputs == NUM_OUTPUTS:
                self.end(request)
                continue
            request.tokens.append(200 + request.num_outputs)
            request.update_block_hashes()

    def check_block(self, tokens, index, block):
        for rank in range(LAYOUT.tp_size):
            assert self.is_right(tokens, index, block, rank), (block, index, rank)

    def is_right(self, tokens, index, block, rank):
        for layer in range(LAYERS):
            expected = block_content(tokens, index, rank // REPLICAS, layer)
            if self.data(block, rank, layer)[: len(expected)] != expected:
                return False
        return not self.is_poisoned(block, rank)

    def is_poisoned(self, block, rank):
        return any(POISON in self.data(block, rank, layer) for layer in range(LAYERS))

    def data(self, block, rank, layer):
        return bytes(self.caches[rank][layer][block.block_id].flatten().tolist())

    def check_integrity(self):
        self.service.receiver.check_integrity()
        for block in self.pool.blocks[1:]:
            assert (block.ref_cnt == 0) == (block in self.pool.free), block

    def end_all(self):
        """Lets everything end that can, and checks that all was given back."""
        self.service.is_stopped = False
        for coming in list(self.coming):
            self.deliver(coming, 1000)
            self.submit(coming)
        for _ in range(4 * NUM_OUTPUTS):
            self.run_step()
        assert not self.ending
        for request in [*self.waiting, *self.running, *self.loading]:
            # The request waits for its handoff or for blocks.
            assert not self.is_calm or request.num_computed == 0
            self.end(request)
        self.run_step()
        self.run_step()
        assert all(block.ref_cnt == 0 for block in self.pool.blocks)
        for stream in range(1, self.num_streams + 1):
            self.service.receiver.handle_stream_lost(stream, self.service.now)
        self.service.receiver.check_integrity()
        assert self.service.receiver.arena_statistics().used_bytes == 0


def engine_with(*args, is_calm=True, verifies_late=False, **options):
    """Returns an engine and a handoff on its way to it, whose request is not submitted yet."""
    engine = DrivenEngine(is_calm, verifies_late=verifies_late)
    engine.begin(*args, **options)
    return engine, engine.coming[0]


def num_uncommitted(coming):
    """Returns the number of messages of the first epoch, without its commits."""
    return sum(stream == 1 for stream, _ in coming.messages) - SHARDS
