"""Caches with several groups of layers: windows, states, layers of different sizes.

An engine's block tables are kept here as vLLM keeps them. The connector's halves and the transfer
services are the real ones.
"""

import asyncio
import dataclasses
import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer import staging_size
from baton.kvtransfer.connector.handoffs.handoff_scheduler import HandoffScheduler
from baton.kvtransfer.connector.handoffs.rank_handoffs import RankHandoffs
from baton.kvtransfer.connector.request_params import encode
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv import kv_fingerprint
from baton.runtime.kv.kv_groups import NULL_BLOCK, KvGroup
from baton.v1 import kv_transfer_pb2 as pb

BASE = KvLayout("m", "r", "uint8", 6, 2, 8, 4, 64, "heads,tokens,content")
FULL = KvGroup("full", 2, 2, 4, 64, table=0)
WINDOW = KvGroup("window", 1, 1, 8, 64, window_tokens=10, table=1)
NARROW = KvGroup("window", 2, 2, 4, 64, window_tokens=3, table=2)
STATE = KvGroup("state", 2, 1, 8, 96, table=3)
MODELS = {
    "window in every layer": [KvGroup("window", 3, 2, 4, 64, window_tokens=10)],
    "windows and full": [FULL, WINDOW],
    "two windows": [FULL, WINDOW, NARROW],
    "two sizes in one table": [FULL, KvGroup("full", 1, 1, 4, 32, table=0)],
    "states": [FULL, WINDOW, NARROW, STATE],
    "states only": [KvGroup("state", 3, 1, 1024, 96)],
}
# Models with a draft, whose layers come last.
DRAFT = KvGroup("full", 1, 1, 4, 32, table=0, is_draft=True)
DRAFTED = {
    "draft": [KvGroup("full", 6, 2, 4, 64), DRAFT],
    "draft of the layers' size": [
        KvGroup("full", 6, 2, 4, 64), KvGroup("full", 2, 2, 4, 64, is_draft=True)
    ],
    "draft beside two sizes": [*MODELS["two sizes in one table"], DRAFT],
}  # fmt: skip
MODELS |= DRAFTED
# The same models as the table of docs/models.md names them.
KINDS = {
    "window in every layer": "all windowed",
    "windows and full": "gpt-oss",
    "two windows": "two sizes",
    "states only": "mamba",
    "draft": "eagle",
}


def proven(what, names):
    """Returns the models as parameters that prove something of the kinds of the table."""
    return [
        pytest.param(name, marks=pytest.mark.proves(what, "layout", kind=KINDS[name]))
        if name in KINDS
        else name
        for name in names
    ]


NUM_BLOCKS, WAIT_S = 120, 120.0
# Bytes that a step copies for requests that wait for their loads.
COPIED_PER_STEP = 1000


def layout_of(name):
    draft = "eagle weights" if name in DRAFTED else ""
    return dataclasses.replace(BASE, draft_revision=draft).with_groups(MODELS[name])


@st.composite
def groups(draw):
    """Draws groups whose block sizes are multiples of the smallest one."""
    made = []
    for table in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["full", "window", "state"]))
        window = draw(st.integers(1, 40)) if kind == "window" else 0
        size = 4 * draw(st.sampled_from([1, 2, 4]))
        layers, block_bytes = draw(st.integers(1, 3)), 8 * draw(st.integers(1, 4))
        made.append(KvGroup(kind, layers, 1, size, block_bytes, window, table))
    return made


@given(groups(), st.integers(1, 300))
def test_every_block_of_a_handoff_has_a_place_of_its_own(made, num_tokens):
    layout = BASE.with_groups(made)
    num_blocks, places = layout.num_blocks(num_tokens), []
    for layer in range(layout.num_layers):
        group = layout.group_of(layer)
        for block in layout.blocks(group, num_blocks):
            assert layout.index(layer, block, num_blocks) == len(places)
            begin = layout.offset(0, layer, block, num_blocks)
            places.append((begin, begin + group.block_bytes))
    assert len(places) == layout.shard_blocks(num_blocks)
    assert [begin for begin, _ in places] == [0, *(end for _, end in places[:-1])]
    assert places[-1][1] == layout.shard_bytes(num_blocks)


@given(groups(), st.integers(1, 300), st.booleans())
def test_a_handoff_holds_what_its_receiver_needs_and_no_block_more(made, num_tokens, again):
    layout = BASE.with_groups(made)
    num_loaded = max(1, num_tokens - again)
    for group in made:
        held = layout.blocks(group, layout.num_blocks(num_tokens))
        if group.kind == "state":
            assert list(held) == [0]
            continue
        # vLLM frees blocks before this token (SlidingWindowManager.get_num_skipped_tokens).
        window = group.window_tokens or num_tokens
        first_token = max(0, num_loaded - window + 1) if group.kind == "window" else 0
        needed = range(
            first_token // group.block_size_tokens, -(-num_loaded // group.block_size_tokens)
        )
        assert set(needed) <= set(held), group
        assert held.stop == -(-num_tokens // group.block_size_tokens)
        spare = (window + layout.counted_tokens) // group.block_size_tokens + 2
        assert len(held) <= max(spare, len(needed))


@pytest.mark.parametrize("name", MODELS)
def test_a_fingerprint_keeps_the_groups(name):
    layout = layout_of(name)
    made = KvLayout.from_fingerprint(layout.fingerprint())
    assert made == layout
    assert made.groups == tuple(MODELS[name])
    for num_tokens in (1, 3, 17, 100):
        assert kv_fingerprint.handoff_bytes(layout.fingerprint(), num_tokens) == (
            layout.handoff_bytes(layout.num_blocks(num_tokens))
        )


def test_fingerprints_with_other_windows_differ_and_the_difference_is_shown():
    ours, theirs = layout_of("windows and full"), layout_of("two windows")
    [shown] = [
        one
        for one in kv_fingerprint.differences(ours.fingerprint(), theirs.fingerprint())
        if one.startswith("groups")
    ]
    assert "2 layers KIND_WINDOW of 4 tokens, 64 bytes, window 3, table 2" in shown
    assert kv_fingerprint.keeps_states(layout_of("states").fingerprint())
    assert not kv_fingerprint.keeps_states(ours.fingerprint())


def test_one_group_that_keeps_every_token_is_no_group():
    plain = KvGroup("full", 6, 2, 4, 64)
    assert BASE.with_groups([plain]) is BASE
    assert BASE.groups == (plain,)
    assert not BASE.fingerprint().groups


def test_staging_holds_any_prompt_whose_layers_all_have_windows():
    layout = layout_of("window in every layer")
    longest = layout.handoff_bytes(layout.num_blocks(10**6))
    assert staging_size.num_tokens(layout, longest) > 10**6
    assert staging_size.shortage(layout, 10**6, longest, longest) is None
    assert staging_size.num_tokens(layout, 64) == 0


# ---- Handoffs.


@dataclass
class Request:
    """The parts of vLLM's Request that are used."""

    request_id: str
    num_tokens: int
    kv_transfer_params: dict
    block_hashes: tuple = ()
    tables: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    priority: int = 0


class Engine:
    """One engine's caches and block tables, with the connector's halves."""

    def __init__(self, worker, layout, seed):
        self.layout, self.random = layout, random.Random(seed)
        self.ports = [EnginePort(worker.client.socket_path, timeout_s=WAIT_S) for _ in range(2)]
        self.half = HandoffScheduler(self.ports[0], layout)
        held = SimpleNamespace(ref_cnt=1)
        self.half.bind(SimpleNamespace(blocks=[held] * NUM_BLOCKS, hash_block_size=4))
        self.rank = RankHandoffs(worker.client.socket_path, self.ports[1], 0, layout)
        self.caches = {}
        for layer in range(layout.num_all_layers):
            group = layout.group_of(layer)
            tokens = 1 if group.kind == "state" else group.block_size_tokens
            content = group.block_bytes // group.num_kv_heads // tokens
            shape = (NUM_BLOCKS, group.num_kv_heads, tokens, content)
            self.caches[f"layer.{layer}"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.rank.register(self.caches)
        self.free = list(range(1, NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.numbers = itertools.count()
        # Requests whose loads have ended.
        self.loaded = set()

    def close(self):
        self.rank.close()
        for port in self.ports:
            port.close()

    def allocate(self, request, num_tokens, num_loaded=0):
        """Extends a request's tables, and drops what no later token needs, as vLLM does."""
        request.tables = request.tables or [[] for _ in self.layout.tables]
        begin = request.num_computed + num_loaded
        for table, ids in zip(self.layout.tables, request.tables, strict=True):
            size = table.block_size_tokens
            skipped = {"full": 0, "window": begin - table.window_tokens + 1, "state": begin - 1}
            num_gone = max(0, skipped[table.kind]) // size
            for at in range(min(num_gone, len(ids))):
                if ids[at] != NULL_BLOCK:
                    # Another request may write to the block at once.
                    for cache in self.caches.values():
                        cache[ids[at]] = 0xEE
                    self.free.append(ids[at])
                ids[at] = NULL_BLOCK
            ids.extend([NULL_BLOCK] * (num_gone - len(ids)))
            if table.kind == "state" and begin and len(ids) * size < begin:
                ids.append(self.free.pop())
            ids.extend(self.free.pop() for _ in range(-(-num_tokens // size) - len(ids)))

    def step(self, request, num_tokens):
        """Computes tokens of a request; returns whether its load has failed."""
        output = SimpleNamespace(
            preempted_req_ids=(),
            num_scheduled_tokens={request.request_id: num_tokens},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], resumed_req_ids=()
            ),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.num_computed)
            ],
            scheduled_spec_decode_tokens={},
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: tuple(request.tables)),
        )
        work = self.half.step(output)
        self.rank.begin_step(work)
        self.rank.load(work)
        for layer, name in enumerate(self.caches):
            # vLLM saves layers with states at the step's end.
            if self.layout.group_of(layer).kind != "state":
                self.rank.save(name)
        self.rank.end_step()
        self.rank.copy_waited(COPIED_PER_STEP)
        ended, failed = self.rank.take_ended()
        invalid = self.rank.take_invalid_block_ids()
        self.half.reported(self.rank.take_report())
        self.half.loaded(ended)
        self.half.distrust(invalid)
        self.half.finish_step()
        request.num_computed += num_tokens
        self.loaded |= ended
        return bool(invalid or failed)

    def idle_step(self):
        """Makes a step that computes nothing; returns whether a load has failed."""
        return self.step(Request("idle", 0, {}, tables=[[] for _ in self.layout.tables]), 0)

    def end(self, request):
        self.half.finished(request, tuple(request.tables))
        # vLLM makes a step after every end of a request; it releases what was loaded.
        self.idle_step()
        self.free += [one for ids in request.tables for one in ids if one != NULL_BLOCK]

    def content(self, request, num_tokens):
        """Returns the bytes that a request needs behind this many tokens, by layer and block."""
        kept = {}
        for layer, cache in enumerate(self.caches.values()):
            group = self.layout.group_of(layer)
            ids = request.tables[group.table]
            last = (num_tokens - 1) // group.block_size_tokens
            first = {"full": 0, "window": num_tokens - group.window_tokens + 1, "state": None}
            begin = first[group.kind]
            begin = last if begin is None else max(0, begin) // group.block_size_tokens
            for at in range(begin, last + 1):
                kept[layer, at] = cache[ids[at]].clone()
        return kept


async def hand_over(
    sender, receiver, engines, lengths, *, skip_tokens=0, alter=False, num_loaded=None
):
    """Hands a prompt over; returns what both ends hold of it.

    Args:
        sender: The worker that computes the prompt.
        receiver: The worker that loads it.
        engines: Their engines.
        lengths: Tokens of each chunk of the prompt.
        skip_tokens: Tokens that the receiver holds already.
        alter: Whether staging is altered before the load.
        num_loaded: Number of loaded tokens of a request whose first output token is forced.
    """
    prefill, decode = engines
    layout, num_tokens = prefill.layout, sum(lengths)
    handoff_id = random.randbytes(16)
    num_sent = num_tokens - skip_tokens
    offset = await sender.client.open_send(
        handoff_id, receiver.client.address, layout.num_blocks(num_sent), num_sent, WAIT_S
    )
    send = SendHandoff(handoff_id, offset, num_tokens, skip_tokens)
    computing = Request("computes", num_tokens, encode(send=send))
    prefill.half.add(computing)
    for length in lengths:
        prefill.allocate(computing, computing.num_computed + length)
        prefill.step(computing, length)
    given = prefill.content(computing, num_tokens)
    prefill.end(computing)
    await receiver.received(handoff_id, pb.HANDOFF_STATE_COMMITTED)
    if alter:
        memory = decode.ports[0].memory
        begin = decode.ports[0].description.send_bytes
        memory[begin] ^= 1
    receive = ReceiveHandoff(handoff_id, num_tokens, WAIT_S, skip_tokens)
    num_known = num_tokens + (num_loaded is None)
    loading = Request("loads", num_known, encode(receive=receive))
    decode.half.add(loading)
    if skip_tokens:
        decode.allocate(loading, skip_tokens)
        loading.num_computed = skip_tokens
    expected = num_sent if num_loaded is None else num_loaded
    while (found := decode.half.num_loadable_tokens(loading, skip_tokens)) is None:
        await asyncio.sleep(0.01)
    assert found == expected
    failed, waits = False, decode.half.requests_wait
    decode.allocate(loading, skip_tokens + expected if waits else num_known, expected)
    decode.half.allocated(loading, loading.tables, expected)
    loading.num_computed += expected
    async with asyncio.timeout(WAIT_S):
        while waits and "loads" not in decode.loaded:
            failed = decode.idle_step()
            # The step has asked the service, which may need many steps' time for its answer.
            await asyncio.sleep(0.001)
    decode.loaded.clear()
    if not failed:
        decode.allocate(loading, num_known)
        failed = decode.step(loading, num_known - loading.num_computed)
    taken = decode.content(loading, num_tokens)
    decode.end(loading)
    assert failed is alter
    return given, taken


@pytest.fixture
async def engines(start):
    """Starts two workers and their engines."""
    made = []

    async def begin(layout, receiver_s=None):
        layouts = [layout, receiver_s or layout]
        workers = await asyncio.gather(*(start(layout=one) for one in layouts))
        for seed, (worker, one) in enumerate(zip(workers, layouts, strict=True)):
            made.append(Engine(worker, one, seed))
        return *workers, made

    yield begin
    for engine in made:
        engine.close()


@pytest.mark.parametrize("name", proven("handoff", MODELS))
async def test_windows_and_states_arrive_whatever_the_chunks_are(name, engines):
    sender, receiver, made = await engines(layout_of(name))
    chunks = random.Random(name)
    for num_tokens in [*range(1, 14), 16, 17, 24, 33, 47, 48, 71]:
        left, lengths = num_tokens, []
        while left:
            lengths.append(chunks.randint(1, left))
            left -= lengths[-1]
        given, taken = await hand_over(sender, receiver, made, lengths)
        assert given.keys() == taken.keys()
        for place, data in given.items():
            assert torch.equal(data, taken[place]), (num_tokens, lengths, place)
    await sender.empty()
    await receiver.empty()


async def test_a_draft_is_gathered_when_the_step_ends(engines):
    """It may run several times in a step, and writes to its cache until its last run has ended."""
    sender, receiver, made = await engines(layout_of("draft"))
    prefill = made[0]
    end_step = prefill.rank.end_step

    def draft():
        list(prefill.caches.values())[-1].fill_(77)
        end_step()

    prefill.rank.end_step = draft
    _, taken = await hand_over(sender, receiver, made, [9, 14])
    assert all((taken[6, at] == 77).all() for at in range(6))


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("which", ["sender", "receiver"])
async def test_only_one_end_may_have_a_draft(name, which, engines):
    """The other layers arrive. A receiver's draft finds zeros, and not another request's keys."""
    drafted = layout_of(name)
    layouts = [drafted, drafted.without_draft()]
    sender, receiver, made = await engines(*(layouts if which == "sender" else layouts[::-1]))
    given, taken = await hand_over(sender, receiver, made, [9, 14])
    num_layers = drafted.num_layers
    for place in given.keys() & taken.keys():
        assert torch.equal(given[place], taken[place]), place
    of_draft = {place for place in taken if place[0] >= num_layers}
    assert bool(of_draft) is (which == "receiver")
    assert not any(taken[place].any() for place in of_draft)
    await hand_over(sender, receiver, made, [20, 13], alter=True)
    await sender.empty()
    await receiver.empty()


def test_two_drafts_must_be_equal():
    ours = layout_of("draft")
    theirs = dataclasses.replace(ours, draft_revision="eagle other weights")
    assert kv_fingerprint.differences(ours.fingerprint(), theirs.fingerprint()) == [
        "draft_revision is 'eagle other weights', here 'eagle weights'"
    ]
    narrow = ours.with_groups([*MODELS["draft"][:1], dataclasses.replace(DRAFT, block_bytes=16)])
    [shown] = kv_fingerprint.differences(ours.fingerprint(), narrow.fingerprint())
    assert "draft_groups is [1 layers KIND_FULL of 4 tokens, 16 bytes" in shown
    plain = ours.without_draft()
    assert plain == BASE
    assert not kv_fingerprint.differences(plain.fingerprint(), ours.fingerprint())
    assert not kv_fingerprint.differences(ours.fingerprint(), plain.fingerprint())
    # A worker of an earlier version compares this field.
    assert plain.fingerprint().layout != ours.fingerprint().layout


@pytest.mark.parametrize(
    "name",
    proven(
        "prefix reuse",
        ["window in every layer", "windows and full", "two windows", "two sizes in one table"],
    ),
)
async def test_a_prefix_that_the_receiver_holds_is_left_out(name, engines):
    layout = layout_of(name)
    sender, receiver, made = await engines(layout)
    skip_tokens = 2 * layout.block_size_tokens
    given, taken = await hand_over(sender, receiver, made, [30, 9], skip_tokens=skip_tokens)
    for (layer, at), data in given.items():
        if at >= skip_tokens // layout.group_of(layer).block_size_tokens:
            assert torch.equal(data, taken[layer, at]), (layer, at)


@pytest.mark.parametrize("name", MODELS)
async def test_an_altered_byte_of_any_group_fails_the_load(name, engines):
    sender, receiver, made = await engines(layout_of(name))
    await hand_over(sender, receiver, made, [20, 13], alter=True)


@pytest.mark.parametrize("name", MODELS)
async def test_a_request_that_computes_the_last_token_again_loads_no_state(name, engines):
    """Its first output token is forced; a window is loaded nevertheless."""
    layout = layout_of(name)
    sender, receiver, made = await engines(layout)
    num_loaded = 0 if layout.has_states else 22
    given, taken = await hand_over(sender, receiver, made, [9, 14], num_loaded=num_loaded)
    for place, data in given.items() if num_loaded else ():
        group = layout.group_of(place[0])
        # The last token of the last block is not compared: the request computes it itself.
        rows = taken[place].shape[1] - (place[1] == 22 // group.block_size_tokens)
        assert torch.equal(data[:, :rows], taken[place][:, :rows]), place


async def test_blocks_before_a_window_are_refused(engines):
    """A frame outside what the handoff holds would be written outside its staging."""
    layout = layout_of("window in every layer")
    sender, receiver, _ = await engines(layout)
    handoff_id = bytes(range(16))
    await sender.client.open_send(handoff_id, receiver.client.address, 10, 40, WAIT_S)
    held = layout.blocks(layout.groups[0], 10)
    assert held.start == 6
    frame = pb.LocalFrame(handoff_id=handoff_id, shard=0, layer=0, first_block=5, num_blocks=1)
    sender.port.send_frames([frame])
    ended = await sender.sent(handoff_id)
    assert "blocks 5 to 6 were filled; the handoff has 6 to 10" in ended.detail
    with pytest.raises(TransferRefused, match="num_tokens is 41; must be 1 to 40"):
        await sender.client.open_send(bytes(16), receiver.client.address, 10, 41, WAIT_S)
