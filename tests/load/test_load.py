"""The load generator sends the planned requests on time and counts the answers."""

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.cli.main import app
from baton.client import BatonClient
from baton.client.events import Usage
from baton.load.figures import Figures, Result
from baton.load.generator import Generator, Outcome
from baton.load.lengths import Lengths
from baton.load.measured import Measured, Sample, Slo
from baton.load.plan import LaneRule, Planned, arrival_times, generated, replayed
from baton.load.prompts import Prompts
from baton.load.traces import Arrival
from baton.runtime import errors
from baton.runtime.network import rpc
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

VOCAB_SIZE = 432
ANY = Slo()


# ---- The plan: lengths, times, lanes, prompts.


@pytest.mark.parametrize(
    ("text", "mean", "variation"), [("64", 64, 0), ("10-90", 50, 0.462), ("300~0.5", 300, 0.5)]
)
def test_lengths_have_their_mean_and_spread(text, mean, variation):
    lengths, chance = Lengths.parse(text, "--prompt-tokens"), random.Random(1)
    drawn = [lengths.draw(chance) for _ in range(20_000)]
    seen = sum(drawn) / len(drawn)
    assert seen == pytest.approx(mean, rel=0.02)
    spread = (sum((one - seen) ** 2 for one in drawn) / len(drawn)) ** 0.5
    assert spread / seen == pytest.approx(variation, rel=0.05, abs=1e-9)
    assert min(drawn) >= 1


@pytest.mark.parametrize("text", ["", "0", "9-3", "x", "5~", "1-2~3", "-4"])
def test_wrong_lengths_are_refused_with_the_option_name(text):
    with pytest.raises(
        ValueError, match=r"--output-tokens is .*; must be N, LOW-HIGH .evenly. or MEAN~CV"
    ):
        Lengths.parse(text, "--output-tokens")


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_their_rate_and_burstiness(burstiness):
    times = list(itertools.islice(arrival_times(20.0, burstiness, random.Random(2)), 20_000))
    assert times == sorted(times)
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_the_same_seed_sends_the_same_requests():
    def plan(seed):
        times = arrival_times(5.0, 1.0, random.Random(seed))
        lengths = Lengths.parse("1-900", ""), Lengths.parse("60~1", "")
        return list(itertools.islice(generated(times, *lengths, LaneRule(0.3), seed), 50))

    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


def test_lanes_follow_their_rule():
    chance = random.Random(5)
    lanes = [LaneRule(0.25).lane(10, chance) for _ in range(10_000)]
    assert lanes.count("batch") / len(lanes) == pytest.approx(0.25, abs=0.02)
    by_length = LaneRule(batch_prompt_tokens=1000)
    assert by_length.lane(999, chance) == "interactive"
    assert by_length.lane(1000, chance) == "batch"
    with pytest.raises(ValueError, match=r"--batch-share is 1\.5; must be 0 to 1"):
        LaneRule(1.5)


def test_a_replay_divides_times_by_its_speed():
    trace = [Arrival(0.0, 10, 2), Arrival(3.0, 20, 4, (7,))]
    sent = list(replayed(trace, 1.5, LaneRule(), 0))
    assert [one.at_s for one in sent] == [0.0, 2.0]
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in sent] == [(10, 2), (20, 4)]
    assert sent[1].block_ids == (7,)


def num_equal(one, other):
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


blocks = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@given(blocks, blocks, st.integers(0, 600), st.integers(0, 600))
def test_prompts_share_exactly_their_common_blocks(first, second, first_rest, second_rest):
    prompts = Prompts(VOCAB_SIZE, 11)
    planned = [
        Planned(number, 0.0, 512 * len(ids) + rest, 1, "interactive", ids)
        for number, (ids, rest) in enumerate([(first, first_rest), (second, second_rest)])
    ]
    made = [prompts.of(one) for one in planned]
    assert [len(one) for one in made] == [one.num_prompt_tokens for one in planned]
    assert all(0 <= token < VOCAB_SIZE for one in made for token in one)
    hashes = [block_hashes(one, 16) for one in made]
    assert num_equal(*hashes) == 512 // 16 * num_equal(first, second)


def test_prompts_of_another_seed_share_nothing():
    planned = Planned(0, 0.0, 512, 1, "interactive", (0,))
    one, other = (Prompts(VOCAB_SIZE, seed).of(planned) for seed in (1, 2))
    assert block_hashes(one, 16)[0] != block_hashes(other, 16)[0]


# ---- The measurements.


class Answering(inference_pb2_grpc.InferenceServicer):
    """Answers each request with its tokens once `hold` is set.

    `refuse` returns the error of a request that fails, else None.
    """

    def __init__(self, refuse=lambda request: None) -> None:
        self.refuse, self.hold = refuse, asyncio.Event()
        self.hold.set()
        self.running = self.most_running = 0
        self.requests = []
        self.arrived = asyncio.Event()

    async def seen(self, count):
        """Waits until `count` requests have arrived."""
        async with asyncio.timeout(120):
            while len(self.requests) < count:
                self.arrived.clear()
                await self.arrived.wait()

    async def Session(self, request_iterator, context):
        events = asyncio.Queue()

        async def answer(submit):
            number, wanted = submit.stream, submit.request
            self.requests.append(wanted)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.arrived.set()
            await self.hold.wait()
            await asyncio.sleep(0)
            self.running -= 1
            if (error := self.refuse(wanted)) is not None:
                failed = errors.to_message(error)
                return events.put_nowait(inference_pb2.SessionEvent(stream=number, failed=failed))
            count, prompt = wanted.sampling.max_tokens, len(wanted.tokens.ids)
            accepted = inference_pb2.Accepted(
                request_id=str(number), model="m", prompt_tokens=prompt
            )
            usage = common_pb2.Usage(
                prompt_tokens=prompt, completion_tokens=count, cached_prompt_tokens=prompt // 2
            )
            done = inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
            for event in (
                inference_pb2.SessionEvent(stream=number, accepted=accepted),
                *(
                    inference_pb2.SessionEvent(
                        stream=number, delta=common_pb2.TokenDelta(offset=one, token_ids=[7])
                    )
                    for one in range(count)
                ),
                inference_pb2.SessionEvent(stream=number, finished=done),
            ):
                events.put_nowait(event)
            return None

        async def read():
            async with asyncio.TaskGroup() as group:
                async for message in request_iterator:
                    for one in message.batch or [message]:
                        if one.HasField("submit"):
                            group.create_task(answer(one.submit))

        reader = asyncio.create_task(read())
        try:
            while True:
                yield inference_pb2.SessionEvents(events=[await events.get()])
        finally:
            reader.cancel()


@asynccontextmanager
async def generator(servicer, *, slo=ANY, **options):
    server = rpc.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    address = rpc.bind(server, "127.0.0.1:0", "listen")
    await server.start()
    try:
        async with BatonClient(address) as client:
            yield Generator(client, Prompts(VOCAB_SIZE, 1), slo, timeout_s=20.0, **options)
    finally:
        await server.stop(None)


def planned(count, tokens=5, lane="interactive", apart_s=0.0):
    return [Planned(number, number * apart_s, 20, tokens, lane) for number in range(count)]


def result(outcome, slo=ANY):
    return Result.of("bench", {}, slo, outcome, is_open=True)


def test_a_request_is_in_time_by_the_target_of_its_prompt():
    """The first token of 1,000 prompt tokens may take 0.1 s, that of 10,000 tokens 1 s."""
    seen = Measured(Slo(ttft=TtftTarget(0.001, 0.1)))
    for number, (num_tokens, ttft_s) in enumerate(((1000, 0.5), (10_000, 0.5))):
        sample = Sample(float(number), float(number))
        seen.sent(sample)
        seen.tokens(sample, 1, number + ttft_s)
        seen.finished(sample, Usage(num_tokens, 1, 0))
    assert (seen.num_ended, seen.num_ttft_within, seen.num_attained) == (2, 1, 1)
    result = Result.of(
        "bench", {}, seen.slo, Outcome({"interactive": seen}, 2.0, False), is_open=True
    )
    assert "50.0% within TTFT 1 ms + 100 ms per 1,000 prompt tokens" in result.figure_rows()[5][1]
    without = replace(result, slo=Slo())
    assert without.figure_rows()[5][1].endswith("; no target is set (--ttft-ms, --itl-ms)")
    assert result.as_json()["targets"]["ttft_ms_per_1k_tokens"] == 100


def test_the_total_of_all_lanes_has_every_count():
    lanes = [Measured(Slo()) for _ in range(2)]
    names = [one.name for one in fields(Measured) if one.name != "slo"]
    for number, lane in enumerate(lanes):
        for name in names:
            match getattr(lane, name):
                case int():
                    setattr(lane, name, 1)
                case Counter() as counts:
                    counts["QUEUE_FULL"] = 1
                case dict() as messages:
                    messages["QUEUE_FULL"] = f"message {number}"
                case histogram:
                    histogram.add(1.0)
    total = Measured.merged(lanes, Slo())
    found = {name: getattr(total, name) for name in names}
    assert found.pop("messages") == {"QUEUE_FULL": "message 0"}
    assert [found.pop(name) for name in ("sheds", "failures")] == [{"QUEUE_FULL": 2}] * 2
    assert {getattr(value, "total", value) for value in found.values()} == {2}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ttft-ms", "inf"], "must be finite and more than 0"),
        (["--itl-ms", "inf"], "must be finite and more than 0"),
        (["--ttft-ms-per-1k-tokens", "5"], "cannot be used without --ttft-ms"),
        (["--ttft-ms", "5", "--ttft-ms-per-1k-tokens", "-1"], "must be finite and at least 0"),
        (["--ttft-ms", "5", "--ttft-ms-per-1k-tokens", "nan"], "must be finite and at least 0"),
        (["--ttft-ms", "5", "--ttft-ms-per-1k-tokens", "inf"], "must be finite and at least 0"),
    ],
)
def test_a_wrong_target_is_refused(arguments, told):
    shown = CliRunner().invoke(app, ["bench", "--rate", "1", *arguments])
    assert shown.exit_code == 2
    assert told in " ".join(shown.output.split())


async def test_an_open_loop_counts_all_its_requests():
    answering, slo = Answering(), Slo(ttft=TtftTarget(20.0), itl_s=1e-9)
    async with generator(answering, slo=slo, tenant="acme") as made:
        plan = [*planned(30), *planned(10, tokens=1, lane="batch")]
        outcome = await made.open_loop(plan, 100, asyncio.Event())
    found = result(outcome, slo)
    total, lanes = found.total, found.lanes
    assert (total.num_requests, total.num_ended, total.num_failed) == (40, 40, 0)
    assert {name: one.num_requests for name, one in lanes.items()} == {
        "interactive": 30,
        "batch": 10,
    }
    assert total.ttft_within == 1
    # An output of one token has no gap, so it cannot miss the ITL target.
    assert (lanes["batch"].attained, lanes["interactive"].attained) == (1, 0)
    assert total.cached_share == 0.5
    assert total.output_tokens_per_s == pytest.approx(160 / found.lasted_s)
    assert {(one.tenant, one.sampling.ignore_eos) for one in answering.requests} == {("acme", True)}
    assert not outcome.interrupted
    assert json.loads(json.dumps(found.as_json()))["lanes"]["batch"]["num_ended"] == 10


async def test_a_late_generator_warns_and_hides_no_wait():
    def stalling():
        for one in planned(5):
            time.sleep(0.04)
            yield one

    async with generator(Answering()) as made:
        outcome = await made.open_loop(stalling(), 100, asyncio.Event())
    found = result(outcome)
    assert found.total.lateness_ms[99] > 190
    assert found.total.ttft_ms[99] > found.total.ttft_from_send_ms[99]
    assert "late at p99" in found.warning


async def test_failures_are_counted_by_reason():
    def refuse(request):
        length = len(request.tokens.ids)
        if length < 10:
            return errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=1.0)
        return errors.Unavailable("gone") if length < 20 else None

    plan = [Planned(n, 0.0, length, 2) for n, length in enumerate([5, 6, 15, 30, 31, 32])]
    async with generator(Answering(refuse)) as made:
        outcome = await made.open_loop(plan, 100, asyncio.Event())
    found = result(outcome)
    assert found.total.sheds == {"QUEUE_FULL": 2}
    assert found.total.failures == {"UNAVAILABLE": 1}
    assert (found.total.num_failed, found.total.num_shed, found.total.num_ended) == (3, 2, 3)
    assert found.total.attained == 0.5
    assert ["shed", "QUEUE_FULL", "2", "full"] in found.failure_rows()


async def test_requests_beyond_the_in_flight_limit_are_not_sent_and_count_as_failed():
    answering = Answering()
    answering.hold.clear()

    def plan():
        yield from planned(7)
        answering.hold.set()

    async with generator(answering) as made:
        outcome = await made.open_loop(plan(), 3, asyncio.Event())
    found = result(outcome)
    assert found.total.failures == {"IN_FLIGHT_LIMIT": 4}
    assert found.total.num_ended == len(answering.requests) == 3


async def test_a_stop_cancels_requests_in_flight_and_keeps_the_measurements():
    answering, stop = Answering(), asyncio.Event()

    def plan():
        yield from planned(4)
        answering.hold.clear()
        yield from planned(1)

    async with generator(answering) as made:
        running = asyncio.create_task(made.closed_loop(plan(), 1, 60.0, stop))
        await answering.seen(5)
        stop.set()
        outcome = await asyncio.wait_for(running, 120)
        found = result(outcome).total
        assert outcome.interrupted
        assert (found.num_requests, found.num_ended, found.num_unfinished) == (5, 4, 1)
        assert (found.num_failed, found.attained) == (0, 1)


async def test_a_closed_loop_keeps_its_concurrency():
    answering = Answering()
    answering.hold.clear()
    async with generator(answering) as made:
        running = asyncio.create_task(made.closed_loop(planned(40), 4, 60.0, asyncio.Event()))
        await answering.seen(4)
        answering.hold.set()
        outcome = await asyncio.wait_for(running, 120)
    assert result(outcome).total.num_ended == 40
    assert answering.most_running == 4


async def test_warm_up_requests_are_sent_but_not_counted():
    answering = Answering()
    # The warm-up ends between the fifth and the sixth request, so rounding does not matter.
    async with generator(answering, warm_up_s=0.045) as made:
        outcome = await made.open_loop(planned(10, apart_s=0.01), 100, asyncio.Event())
    assert len(answering.requests) == 10
    assert result(outcome).total.num_requests == 5


# ---- Comparing two results.


def written(path, ttft_s):
    seen = Measured(Slo())
    seen.ttft.add(ttft_s)
    figures = Figures.of(seen, 1.0)
    result = Result("bench", {}, Slo(), 1.0, False, figures, True)
    path.write_text(json.dumps(result.as_json()))
    return str(path)


def test_results_are_compared_by_percentile(tmp_path):
    files = [written(tmp_path / name, at_s) for name, at_s in (("a", 0.1), ("b", 0.2))]
    shown = CliRunner().invoke(app, ["bench", "compare", *files])
    assert shown.exit_code == 0
    rows = {line[:12].strip(): line.split() for line in shown.stdout.splitlines()[1:]}
    assert float(rows["TTFT p95, ms"][-1]) == pytest.approx(2.0, rel=0.01)
    assert rows["ITL p50, ms"][-3:] == ["-", "-", "-"]
    answer = CliRunner().invoke(app, ["bench", "compare", *files, "--json"])
    figures = {row["figure"]: row for row in json.loads(answer.stdout)}
    assert figures["TTFT p99, ms"]["a"] == pytest.approx(100, rel=0.01)
    assert figures["E2E p50, ms"] == {
        "figure": "E2E p50, ms",
        "a": None,
        "b": None,
        "b_over_a": None,
    }


def test_a_figure_without_a_finite_value_is_missing(tmp_path):
    file = tmp_path / "huge"
    latencies = {key: {"50": math.inf} for key in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")}
    file.write_text(json.dumps({**latencies, "num_requests": 10**400}))
    shown = CliRunner().invoke(app, ["bench", "compare", str(file), str(file), "--json"])
    found = json.loads(shown.stdout, parse_constant=pytest.fail)
    assert {row["a"] for row in found} == {None}


def test_a_run_until_ctrl_c_is_written_as_json():
    """The option is `--duration inf`; JSON has no infinite numbers."""
    seen = Measured(Slo())
    load = {"duration_s": math.inf, "rate": 2.0}
    found = Result.of("bench", load, seen.slo, Outcome({}, 2.0, True), is_open=True).as_json()
    assert json.loads(json.dumps(found), parse_constant=pytest.fail)["load"] == {
        "duration_s": None,
        "rate": 2.0,
    }


@pytest.mark.parametrize("speed", [0.0, math.inf, math.nan])
def test_a_speed_that_is_no_factor_is_refused(speed):
    with pytest.raises(ValueError, match=r"--speed is .*; must be finite and more than 0"):
        replayed([Arrival(0.0, 1, 1)], speed, LaneRule(), 0)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("[]", "ttft_ms is missing"), (None, "cannot be read")]
)
def test_a_file_that_is_not_a_result_is_refused_with_its_name(tmp_path, text, said):
    wrong = tmp_path / "wrong"
    if text is not None:
        wrong.write_text(text)
    right = written(tmp_path / "right", 0.1)
    shown = CliRunner().invoke(app, ["bench", "compare", right, str(wrong)])
    assert shown.exit_code == 2
    assert f"{wrong}: " in shown.stderr
    assert said in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--rate and --concurrency"),
        (("--rate", "1", "--concurrency", "2"), "--rate and --concurrency"),
        (("--rate", "0"), "--rate is 0"),
        (("--rate", "inf"), "--rate is inf"),
        (("--rate", "1", "--duration", "-1"), "--duration"),
        (("--rate", "1", "--duration", "nan"), "--duration"),
        (("--rate", "1", "--warm-up", "inf"), "--warm-up"),
        (("--rate", "1", "--warm-up", "nan"), "--warm-up"),
        (("--rate", "1", "--timeout", "inf"), "--timeout"),
        (("--rate", "1", "--timeout", "nan"), "--timeout"),
        (("--rate", "1", "--timeout", "1e12"), "--timeout"),
        (("--rate", "1", "--burstiness", "-1"), "--burstiness is -1"),
        (("--rate", "1", "--prompt-tokens", "x"), "--prompt-tokens is 'x'"),
        (("--rate", "1", "--prompt-tokens", f"10~{'9' * 200}"), "--prompt-tokens is '10~999"),
        (("--rate", "1", "--prompt-tokens", "9" * 5000), "--prompt-tokens is '999"),
        (("--rate", "1", "--output-tokens", "1-16777217"), "--output-tokens is '1-16777217'"),
        (("--rate", "1", "--batch-share", "2"), "--batch-share is 2"),
        (("--rate", "1", "--itl-ms", "0"), "--itl-ms"),
        (("--rate", "1", "--out", "/no/such/folder/x"), "--out"),
    ],
)
def test_wrong_options_are_refused_with_their_names(arguments, said):
    shown = CliRunner().invoke(app, ["bench", *arguments])
    assert shown.exit_code == 2
    assert said in shown.stderr
