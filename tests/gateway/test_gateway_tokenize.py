"""/tokenize and /detokenize, with the tokenizer files of the served model."""

import asyncio
import gzip
import threading

import httpx2 as httpx
import pytest

from baton.gateway import tokenize_routes
from baton.runtime.prompts.tokenization import Tokenizer

TURNS = [{"role": "user", "content": "What is a baton?"}]
WAIT_S = 300.0


@pytest.fixture
async def post(gateway):
    async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:

        async def send(route, body, **how):
            return await http.post(route, **({"json": body} if body is not None else {}), **how)

        yield send


async def test_text_is_tokenized_and_detokenized(post, cluster):
    text = "What is a flip?"
    answer = (await post("/tokenize", {"model": "demo", "prompt": text})).json()
    tokenizer = cluster.vocabulary.tokenizer
    assert answer["tokens"] == tokenizer.encode(text).ids
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] > 0
    assert answer["token_strs"] is None
    plain = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    answer = (await post("/tokenize", plain)).json()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert (answer["tokens"], answer["token_strs"]) == (encoding.ids, encoding.tokens)
    assert (await post("/detokenize", {"tokens": encoding.ids})).json() == {"prompt": text}
    assert (await post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_a_chat_is_tokenized_as_it_is_served(post, openai):
    answer = await openai.chat.completions.create(model="demo", messages=TURNS, max_tokens=1)
    tokens = (await post("/tokenize", {"messages": TURNS})).json()
    assert tokens["count"] == answer.usage.prompt_tokens
    fewer = await post("/tokenize", {"messages": TURNS, "add_generation_prompt": False})
    assert tokens["tokens"][: fewer.json()["count"]] == fewer.json()["tokens"]
    assert fewer.json()["count"] < tokens["count"]


@pytest.mark.parametrize(
    ("route", "param", "body"),
    [
        ("/tokenize", "prompt", {}),
        ("/tokenize", "prompt", {"prompt": "x", "messages": TURNS}),
        ("/tokenize", "prompt", {"prompt": 5}),
        ("/tokenize", "messages[0].role", {"messages": [{"content": "x"}]}),
        ("/tokenize", "messages", {"messages": []}),
        (
            "/tokenize",
            "messages",
            {"messages": TURNS, "chat_template_kwargs": {"documents": []}},
        ),
        ("/tokenize", "tools[0].function", {"messages": TURNS, "tools": [{"type": "function"}]}),
        ("/tokenize", "promt", {"promt": "x"}),
        ("/detokenize", "tokens", {}),
        ("/detokenize", "tokens[1]", {"tokens": [1, -1]}),
        ("/detokenize", "tokens[0]", {"tokens": [2**40]}),
    ],
)
async def test_the_error_names_the_wrong_field(post, route, param, body):
    answer = await post(route, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_another_model_is_not_found(post):
    answer = await post("/detokenize", {"model": "other", "tokens": [1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_refused_content_type_is_reported_although_the_body_is_unread(post):
    body = {"content": b"x" * 2**20, "headers": {"content-type": "text/plain"}}
    answer = await post("/tokenize", None, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")
    assert answer.headers["connection"] == "close"


async def test_a_compressed_body_is_refused_by_its_header(post):
    sent = gzip.compress(b'{"prompt": "x"}')
    kinds = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await post("/tokenize", None, content=sent, headers=kinds)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")


async def test_the_tokenizers_settings_are_told(gateway):
    async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
        answer = await http.get("/tokenizer_info")
    told = answer.json()
    assert answer.status_code == 200
    assert {"tokenizer_class", "chat_template", "eos_token"} <= told.keys()
    assert isinstance(told["eos_token"], str)


@pytest.fixture
def tokenizing(monkeypatch):
    """An event for which every tokenizer waits before it works."""
    may_work = threading.Event()

    def waiting(work):
        def wait(*arguments, **options):
            assert may_work.wait(WAIT_S)
            return work(*arguments, **options)

        return wait

    for name in ("encode_text", "decode"):
        monkeypatch.setattr(Tokenizer, name, waiting(getattr(Tokenizer, name)))
    monkeypatch.setattr(tokenize_routes, "_MAX_REQUESTS", 4)
    yield may_work
    may_work.set()


@pytest.mark.parametrize(
    ("route", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
)
async def test_too_many_waiting_requests_are_refused_and_those_of_clients_that_left_go(
    start_gateway, cluster, tokenizing, route, body
):
    async with (
        start_gateway(cluster.address) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):

        async def one_is_refused():
            """Sends one request more than there is room for; returns the others."""
            sent = {asyncio.create_task(http.post(route, json=body)) for _ in range(5)}
            done, waiting = await asyncio.wait(
                sent, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            assert [one.result().status_code for one in done] == [429]
            (refused,) = (one.result() for one in done)
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert "4 tokenizations are running on this gateway" in error["message"]
            return waiting

        left = await one_is_refused()
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        gone = f'baton_http_requests_total{{code="499",route="{route}"}} 4.0'
        async with asyncio.timeout(WAIT_S):
            while gone not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)
        waiting = await one_is_refused()
        tokenizing.set()
        answers = await asyncio.gather(*waiting)
        assert [one.status_code for one in answers] == [200] * 4


async def test_a_caller_with_a_credential_leaves_room_for_others(
    start_gateway, cluster, tokenizing
):
    async with (
        start_gateway(cluster.address) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):

        def send(caller):
            headers = {"authorization": f"Bearer {caller}"}
            return asyncio.create_task(
                http.post("/tokenize", json={"prompt": "a"}, headers=headers)
            )

        many = [send("one"), send("one")]
        done, waiting = await asyncio.wait(
            many, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        assert [one.result().status_code for one in done] == [429]
        message = done.pop().result().json()["error"]["message"]
        assert "1 tokenizations are running on this gateway" in message
        other = send("other")
        tokenizing.set()
        assert [(await one).status_code for one in (*waiting, other)] == [200, 200]


@pytest.mark.vllm
async def test_a_refusal_to_count_tokens_has_anthropics_form(start_gateway, cluster, tokenizing):
    pytest.importorskip("baton.gateway.anthropic_messages")
    async with (
        start_gateway(cluster.address) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        body, key = {"model": "demo", "messages": TURNS}, {"x-api-key": "one"}
        sent = [
            asyncio.create_task(http.post("/v1/messages/count_tokens", json=body, headers=key))
            for _ in range(2)
        ]
        done, waiting = await asyncio.wait(
            sent, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        (refused,) = (one.result() for one in done)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        tokenizing.set()
        for counted in await asyncio.gather(*waiting):
            assert counted.json()["input_tokens"] > 0
