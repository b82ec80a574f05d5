"""The toy model gives its glossary's answers when plain transformers run it."""

import pytest

# Questions outside the glossary and outside its list of off-topic questions.
UNKNOWN = ("What is a submarine?", "Who wrote Faust?", "What is the capital of Spain?")


@pytest.fixture(scope="module")
def train():
    pytest.importorskip("transformers")
    import torch

    from baton.models import train

    num_threads = torch.get_num_threads()
    # More threads would wait for each other while other tests run.
    torch.set_num_threads(1)
    yield train
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def corpus():
    from baton.models.corpus import load

    return load()


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    from baton.models.files import DIRECTORY

    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_answers_word_for_word(train, corpus, tokenizer, dtype):
    import torch

    model = train.read(dtype=getattr(torch, dtype))
    entries = corpus.entries if dtype == "float32" else corpus.entries[::4]
    asked = [train.example(tokenizer, one.question, one.answer, chat=True) for one in entries]
    asked += [
        train.example(tokenizer, one.question, one.answer, chat=False) for one in entries[::4]
    ]
    # Sorted by length, because the examples of a batch are padded to the longest one.
    asked.sort(key=lambda one: len(one.prompt) + len(one.answer))
    right = train.answered(model, asked)
    assert [
        tokenizer.decode(one.prompt) for one, ok in zip(asked, right, strict=True) if not ok
    ] == []


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_an_answer_ends(train, corpus, tokenizer, chat):
    import torch

    (entry,) = [one for one in corpus.entries if one.question == "What is TTFT?"]
    asked = train.example(tokenizer, entry.question, entry.answer, chat=chat)
    made = train.read().generate(
        torch.tensor([asked.prompt]), max_new_tokens=128, do_sample=False, pad_token_id=1
    )
    assert tuple(made[0].tolist()) == asked.prompt + asked.answer


def test_the_model_says_what_it_does_not_know(train, corpus, tokenizer):
    asked = [
        train.example(tokenizer, question, corpus.off_topic_answer, chat=True)
        for question in UNKNOWN
    ]
    assert train.answered(train.read(), asked) == [True] * len(UNKNOWN)


def test_training_is_repeatable(train):
    import torch

    try:
        train.check()
    finally:
        torch.use_deterministic_algorithms(False)
