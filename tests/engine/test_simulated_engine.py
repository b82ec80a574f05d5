import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.engine.base import EngineDead, EngineOutput, EngineRequest, Finish, RequestRejected
from baton.engine.sim_blocks import BlockPool
from baton.engine.sim_tokens import TokenChain, Vocabulary, expected_tokens
from baton.engine.simulated import SimulatedEngine
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.runtime import demo_model
from baton.runtime.config import SimulatedAnswer, SimulatedConfig
from baton.runtime.steps.latency import LatencyModel, PrefillChunk
from baton.v1 import common_pb2

INSTANT = SimulatedConfig(time_scale=0, max_model_len=512, kv_tokens=1024, max_num_seqs=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return demo_model.ensure("demo", weights=False, root=tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vocabulary(model: str) -> Vocabulary:
    return Vocabulary.load(model)


async def started(model: str, settings: SimulatedConfig) -> SimulatedEngine:
    engine = SimulatedEngine(model, "m", settings, "")
    await engine.start()
    return engine


@pytest.fixture
async def engine(model: str) -> AsyncIterator[SimulatedEngine]:
    engine = await started(model, INSTANT)
    yield engine
    await engine.stop()
    engine.check_integrity()
    assert engine.take_load().kv_tokens_used == 0


def request(
    name: str,
    prompt: list[int],
    *,
    known: tuple[int, ...] = (),
    known_chars: int = 0,
    prefill_only: bool = False,
    **sampling: object,
) -> EngineRequest:
    return EngineRequest(
        engine_request_id=name,
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(**sampling),
        known_token_ids=known,
        known_text_chars=known_chars,
        prefill_only=prefill_only,
    )


class Answer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.outputs: list[EngineOutput] = []

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]


async def answers(engine: SimulatedEngine, *requests: EngineRequest) -> dict[str, Answer]:
    found = {one.engine_request_id: Answer() for one in requests}
    for one in requests:
        await engine.submit(one)
    open_ids = set(found)
    async with asyncio.timeout(60):
        while open_ids:
            for output in (await engine.next_step()).outputs:
                answer = found[output.engine_request_id]
                answer.tokens += output.token_ids
                answer.text += output.text
                answer.outputs.append(output)
                if output.finish is not None:
                    open_ids.remove(output.engine_request_id)
    engine.check_integrity()
    return found


async def test_tokens_are_the_hash_chain_beside_any_other_requests(
    engine: SimulatedEngine, vocabulary: Vocabulary
) -> None:
    prompts = {f"r{index}": list(range(2, 3 + index * 7)) for index in range(30)}
    found = await answers(
        engine, *(request(name, prompt, max_tokens=20) for name, prompt in prompts.items())
    )
    for name, prompt in prompts.items():
        expected = expected_tokens(vocabulary, prompt, 20)
        assert found[name].tokens == expected
        assert found[name].text == vocabulary.tokenizer.decode(expected)
        assert found[name].last.finish is Finish.LENGTH
    assert engine.take_load().kv_tokens_used == 0


async def test_a_prompt_longer_than_a_step_is_computed_in_chunks(
    model: str, vocabulary: Vocabulary
) -> None:
    engine = await started(model, INSTANT.model_copy(update={"max_num_batched_tokens": 64}))
    prompt = [index % 200 for index in range(300)]
    found = await answers(engine, request("a", prompt, max_tokens=2))
    assert found["a"].tokens == expected_tokens(vocabulary, prompt, 2)
    samples = engine.take_load().samples
    assert [sample.num_prefill_tokens for sample in samples] == [64, 64, 64, 64, 44, 0]
    assert [sample.num_decodes for sample in samples] == [0, 0, 0, 0, 0, 1]
    await engine.stop()


async def test_prefill_only_reports_one_token_and_the_rest_continues_elsewhere(
    engine: SimulatedEngine, vocabulary: Vocabulary
) -> None:
    prompt = list(range(10, 60))
    first = (await answers(engine, request("a", prompt, max_tokens=9, prefill_only=True)))["a"]
    assert first.last.finish is Finish.CUT
    assert first.last.timings is not None
    rest = (
        await answers(
            engine,
            request(
                "b",
                prompt,
                known=tuple(first.tokens),
                known_chars=len(first.text),
                max_tokens=9,
            ),
        )
    )["b"]
    expected = expected_tokens(vocabulary, prompt, 9)
    assert first.tokens + rest.tokens == expected
    assert first.text + rest.text == vocabulary.tokenizer.decode(expected)


async def test_prefill_only_ends_a_request_of_one_token(engine: SimulatedEngine) -> None:
    found = await answers(engine, request("a", [5, 6], max_tokens=1, prefill_only=True))
    assert found["a"].last.finish is Finish.LENGTH


async def test_a_stop_string_across_the_split_ends_the_text_before_it(
    engine: SimulatedEngine, vocabulary: Vocabulary
) -> None:
    prompt = list(range(10, 40))
    one, two = (
        vocabulary.tokenizer.decode([token]) for token in expected_tokens(vocabulary, prompt, 2)
    )
    sampling = {"max_tokens": 8, "stop": [one[-1] + two[0]]}
    first = (await answers(engine, request("a", prompt, prefill_only=True, **sampling)))["a"]
    rest = (
        await answers(
            engine,
            request(
                "b", prompt, known=tuple(first.tokens), known_chars=len(first.text), **sampling
            ),
        )
    )["b"]
    assert first.text + rest.text == one[:-1]
    assert (rest.last.finish, rest.last.stop) == (Finish.STOP, one[-1] + two[0])


async def test_an_answer_ends_by_itself_at_the_length_of_its_prompt(
    engine: SimulatedEngine, vocabulary: Vocabulary
) -> None:
    prompts = {f"r{index}": [index + 2, 9] for index in range(8)}
    found = await answers(engine, *(request(name, prompt) for name, prompt in prompts.items()))
    lengths = {name: len(one.tokens) for name, one in found.items()}
    assert all(one.last.finish is Finish.STOP and not one.last.stop for one in found.values())
    assert all(100 <= length <= 300 for length in lengths.values())
    assert len(set(lengths.values())) > 4
    for name, prompt in prompts.items():
        assert found[name].tokens == expected_tokens(vocabulary, prompt, lengths[name])

    # A second attempt that knows the first tokens ends where the first attempt ended.
    prompt, length = prompts["r3"], lengths["r3"]
    known = tuple(found["r3"].tokens[:70])
    more = await answers(
        engine,
        request("resumed", prompt, known=known),
        request("long", prompt, max_tokens=400, ignore_eos=True),
        request("short", prompt, max_tokens=50),
        request("at least", prompt, max_tokens=400, min_tokens=length + 7),
    )
    assert [*known, *more["resumed"].tokens] == found["r3"].tokens
    assert more["resumed"].last.finish is Finish.STOP
    assert (len(more["long"].tokens), more["long"].last.finish) == (400, Finish.LENGTH)
    assert (len(more["short"].tokens), more["short"].last.finish) == (50, Finish.LENGTH)
    assert (len(more["at least"].tokens), more["at least"].last.finish) == (length + 7, Finish.STOP)


async def test_without_a_mean_answers_end_at_max_tokens_only(model: str) -> None:
    engine = await started(model, INSTANT.model_copy(update={"mean_output_tokens": 0}))
    found = await answers(engine, request("a", [5, 6], max_tokens=500))
    assert (len(found["a"].tokens), found["a"].last.finish) == (500, Finish.LENGTH)
    await engine.stop()


@pytest.mark.parametrize("mean", [0, 200])
async def test_a_written_answer_follows_the_last_of_the_texts_before_it(
    model: str, vocabulary: Vocabulary, mean: int
) -> None:
    call = '<tool_call>\n{"name": "run"}\n</tool_call>'
    written = [
        SimulatedAnswer(after="How cold is it?", answer=call),
        SimulatedAnswer(after="-3 C", answer="It is cold."),
    ]
    settings = INSTANT.model_copy(update={"mean_output_tokens": mean, "answers": written})
    engine = await started(model, settings)

    def ask(name: str, text: str, **options: object) -> EngineRequest:
        return request(name, vocabulary.tokenizer.encode(text).ids, **options)

    other = vocabulary.tokenizer.encode("What is a flip?").ids
    found = await answers(
        engine,
        ask("call", "Hello. How cold is it?"),
        ask("answer", "How cold is it? -3 C Say it."),
        ask("cut", "How cold is it?", max_tokens=3),
        ask("more", "-3 C", max_tokens=100, ignore_eos=True),
        request("other", other, max_tokens=5),
    )
    assert (found["call"].text, found["call"].last.finish) == (call, Finish.STOP)
    assert (found["answer"].text, found["answer"].last.finish) == ("It is cold.", Finish.STOP)
    assert (len(found["cut"].tokens), found["cut"].last.finish) == (3, Finish.LENGTH)
    assert found["more"].text.startswith("It is cold.")
    assert len(found["more"].tokens) == 100
    assert found["other"].tokens == expected_tokens(vocabulary, other, 5)
    # Another worker goes on after the first token.
    prompt, tokens = vocabulary.tokenizer.encode("How cold is it?").ids, found["call"].tokens
    rest = await answers(engine, request("rest", prompt, known=(tokens[0],)))
    assert [tokens[0], *rest["rest"].tokens] == tokens
    await engine.stop()


@pytest.mark.parametrize("mean", [1, 2, 7, 200])
def test_answer_lengths_are_spread_around_the_mean(vocabulary: Vocabulary, mean: int) -> None:
    lengths = [TokenChain(vocabulary, [2, i, 5]).answer_length(mean) for i in range(2000)]
    assert (mean + 1) // 2 <= min(lengths) <= max(lengths) <= mean * 3 // 2
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings_and_min_tokens(
    engine: SimulatedEngine, vocabulary: Vocabulary, include: bool
) -> None:
    prompt = [9, 8, 7]
    tokens = expected_tokens(vocabulary, prompt, 30)
    text = vocabulary.tokenizer.decode(tokens)
    stop = text[10:13]
    at = text.index(stop)
    found = await answers(
        engine,
        request("a", prompt, max_tokens=30, stop=[stop], include_stop_str_in_output=include),
        request("b", prompt, max_tokens=30, stop=[text[0]], min_tokens=30),
        request("c", prompt, max_tokens=30, stop_token_ids=[tokens[4]]),
    )
    assert found["a"].text == (text[: at + 3] if include else text[:at])
    assert found["a"].last.stop == stop
    assert found["b"].tokens == tokens
    assert found["c"].last.stop == str(tokens[4])
    assert found["c"].tokens == tokens[: tokens.index(tokens[4]) + 1]


async def test_logprobs_name_the_chosen_token_first(engine: SimulatedEngine) -> None:
    found = await answers(engine, request("a", [4, 5, 6], max_tokens=2, logprobs=2))
    rows = [row for output in found["a"].outputs for row in output.logprobs]
    assert [row[0].token_id for row in rows] == found["a"].tokens
    assert [len(row) for row in rows] == [3, 3]


@pytest.mark.parametrize("known", [(), (7, 8)])
async def test_prompt_logprobs_come_with_the_first_output(
    engine: SimulatedEngine, known: tuple[int, ...]
) -> None:
    """A request that continues returns them too: it may have lost the worker that had them."""
    asked = request("a", [4, 5, 6], known=known, max_tokens=4, prompt_logprobs=0)
    first, *later = (await answers(engine, asked))["a"].outputs
    rows = first.prompt_logprobs
    assert [[entry.token_id for entry in row] for row in rows] == [[], [5], [6]]
    assert not any(output.prompt_logprobs for output in later)


def test_the_worker_of_a_handoff_does_not_return_prompt_logprobs_again() -> None:
    asked = request("a", [4, 5, 6], known=(7,), prompt_logprobs=0)
    whole, fetched = (
        dataclasses.replace(asked, receive=ReceiveHandoff(bytes(16), 3, 60.0, is_fetch=is_fetch))
        for is_fetch in (False, True)
    )
    assert not whole.returns_prompt_logprobs
    assert fetched.returns_prompt_logprobs


async def test_without_room_requests_are_preempted_and_still_right(
    model: str, vocabulary: Vocabulary
) -> None:
    settings = INSTANT.model_copy(
        update={"max_model_len": 128, "kv_tokens": 256, "max_num_seqs": 16}
    )
    engine = await started(model, settings)
    prompts = {f"r{index}": [index + 2] * 30 for index in range(12)}
    found = await answers(
        engine, *(request(name, prompt, max_tokens=90) for name, prompt in prompts.items())
    )
    for name, prompt in prompts.items():
        assert found[name].tokens == expected_tokens(vocabulary, prompt, 90)
    assert engine.take_load().kv_tokens_used == 0
    await engine.stop()


async def test_abort_frees_blocks_and_silences_queued_outputs(engine: SimulatedEngine) -> None:
    await engine.submit(request("a", [3] * 40, max_tokens=400))
    await engine.submit(request("b", [4] * 40, max_tokens=400))
    async with asyncio.timeout(60):
        await engine.next_step()
        await engine.abort(["a", "unknown"])
        for _ in range(5):
            step = await engine.next_step()
            assert {output.engine_request_id for output in step.outputs} <= {"b"}
    assert engine.take_load().num_running == 1
    await engine.abort(["b"])
    load = engine.take_load()
    assert (load.kv_tokens_used, load.num_running, load.num_waiting) == (0, 0, 0)


async def test_a_preempted_prefill_starts_over(model: str, vocabulary: Vocabulary) -> None:
    settings = INSTANT.model_copy(
        update={"time_scale": 1.0, "prefill_base_ms": 30.0, "max_num_batched_tokens": 64}
    )
    engine = await started(model, settings)
    prompt = [7] * 200
    await engine.submit(request("a", prompt, max_tokens=1))
    async with asyncio.timeout(60):
        await engine.next_step()
        assert engine.preempt("a")
        tokens: list[int] = []
        while not tokens:
            for output in (await engine.next_step()).outputs:
                tokens += output.token_ids
    assert tokens == expected_tokens(vocabulary, prompt, 1)
    assert engine.take_load().kv_tokens_used == 0
    await engine.stop()


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ([], {}, "prompt has 0 tokens"),
        ([1] * 512, {}, "must be 1 to 511"),
        ([10**6], {}, "token id"),
        ([1], {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_bad_requests_are_rejected_by_name(
    engine: SimulatedEngine, prompt: list[int], sampling: dict[str, int], named: str
) -> None:
    with pytest.raises(RequestRejected, match=named):
        await engine.submit(request("a", prompt, **sampling))


async def test_max_tokens_defaults_to_the_context(engine: SimulatedEngine) -> None:
    found = await answers(engine, request("a", [3] * 500))
    assert len(found["a"].tokens) == 12


async def test_start_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match=r"tokenizer\.json"):
        await SimulatedEngine(str(tmp_path), "m", INSTANT, "").start()


async def test_a_stopped_engine_raises_in_next_step(model: str) -> None:
    engine = await started(model, INSTANT)
    waiting = asyncio.create_task(engine.next_step())
    await engine.stop()
    with pytest.raises(EngineDead):
        await waiting


async def test_time_passes_as_the_latency_model_says(model: str) -> None:
    settings = INSTANT.model_copy(
        update={"time_scale": 0.5, "prefill_base_ms": 40.0, "step_base_ms": 20.0}
    )
    engine = await started(model, settings)
    await answers(engine, request("a", [5] * 100, max_tokens=3))
    latency, samples = LatencyModel.from_config(settings), engine.take_load().samples
    assert samples[0].duration_s >= 0.5 * latency.prefill_s(100)
    assert samples[1].duration_s >= 0.5 * latency.decode_step_s(1, 101)
    await engine.stop()


def test_chunks_of_a_prompt_cost_their_sum() -> None:
    model = LatencyModel(0.0, 1e-3, 1e-6, 5e-3, 1e-3, 1e-6)
    whole = model.prefill_s(100)
    parts = model.step_s([PrefillChunk(0, 60)], 0, 0) + model.step_s([PrefillChunk(60, 40)], 0, 0)
    assert parts == pytest.approx(whole)
    assert model.step_s([PrefillChunk(0, 100)], 4, 1000) == pytest.approx(
        whole + model.decode_step_s(4, 1000)
    )


def test_a_block_pool_gives_out_each_block_once() -> None:
    pool = BlockPool(4, 16)
    assert pool.grow("a", 17)
    assert pool.grow("b", 32)
    assert not pool.grow("c", 1)
    pool.check_integrity()
    pool.free("a")
    assert pool.grow("c", 1)
    assert pool.num_used_blocks == 3
    pool.check_integrity()
