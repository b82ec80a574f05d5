"""How many tokens of an output are reasoning."""

import pytest
from tokenizers import Tokenizer

from baton.client import Tokens
from baton.gateway.request_bodies import ChatBody
from tests.gateway.thinker import ANSWER, THINK, write_thinker

vllm_parsers = pytest.importorskip("baton.gateway.vllm_parsers")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The files of a tokenizer with tokens before and behind reasoning."""
    directory = tmp_path_factory.mktemp("thinker")
    write_thinker(directory)
    return directory


@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v3"])
@pytest.mark.parametrize(
    ("prompt", "output", "reasoning"),
    [
        (f"Why? {THINK}\n", f"Hm, so.{ANSWER}It is cold.", "Hm, so."),
        (f"Why? {THINK}\n", "Hm, so.", "Hm, so."),
        (f"Why? {THINK}\n", f"{THINK}Hm, so.{ANSWER}It is cold.", "Hm, so."),
        ("Why?", f"{THINK}Hm, so.{ANSWER}It is cold.", "Hm, so."),
        (f"{THINK}Ah.{ANSWER} Why?", f"{THINK}Hm, so.{ANSWER}Cold.", "Hm, so."),
        (f"Why? {THINK}{ANSWER}", "It is cold.", ""),
    ],
)
async def test_reasoning_that_the_prompt_opens_is_counted(
    directory, name, prompt, output, reasoning
):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    parsers = vllm_parsers.OutputParsers(vllm_parsers.OutputParserNames("", name), str(directory))
    kwargs = {"thinking": True}
    body = ChatBody(messages=[{"role": "user", "content": "Why?"}], chat_template_kwargs=kwargs)
    chat = await parsers.chat(body)
    whole, streamed = chat.choices(2, ids(prompt))
    whole.message(output, ids(output))
    assert whole.num_reasoning_tokens == len(ids(reasoning))
    counts = []
    for one in ids(output):
        text = tokenizer.decode([one], skip_special_tokens=False)
        streamed.delta(Tokens((one,), text, len(counts)), finished=False)
        counts.append(streamed.num_reasoning_tokens)
    assert counts == sorted(counts)
    assert counts[-1] == len(ids(reasoning))
