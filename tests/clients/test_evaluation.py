"""lm-eval with the tokenizer of the server, on real vLLM: its scores depend on the logprobs."""

import json

from baton.models.corpus import load
from tests.clients.client_runs import ENVIRONMENT, MODEL, version_of

NUM_QUESTIONS = 4


def task(name, directory, rows, **keys):
    """Writes a task of lm-eval; JSON is YAML."""
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(directory / f"{name}.jsonl")}}
    found = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    # The toy model's chat template; vLLM adds the first token.
    found["doc_to_text"] = "<|user|>{{question}}<|assistant|>"
    (directory / f"{name}.yaml").write_text(json.dumps({**found, **keys}))


def test_lm_eval_finds_that_the_toy_model_knows_its_glossary(baton_on_vllm, row):
    baton = baton_on_vllm
    row(
        "lm-eval",
        version_of("lm-eval"),
        "local-completions on vLLM with the server's tokenizer: multiple choice and generation",
    )
    entries = [entry for entry in load().entries if "\n" not in entry.answer][:NUM_QUESTIONS]
    rows = [
        {
            "question": entry.question,
            "choices": [entry.answer, entries[index - 1].answer],
            "right": 0,
        }
        for index, entry in enumerate(entries)
    ]
    tasks = baton.directory / "tasks"
    tasks.mkdir()
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choice |= {"doc_to_target": "{{right}}", "target_delimiter": ""}
    task("choose", tasks, rows, **choice, metric_list=[{"metric": "acc"}])
    say = {"output_type": "generate_until", "doc_to_target": "{{choices[0]}}"}
    say["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 100, "temperature": 0}
    task("say", tasks, rows, **say, metric_list=[{"metric": "exact_match"}])
    arguments = {
        "model": MODEL,
        "base_url": f"{baton.url}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 2,
        "max_length": 2048,
    }
    baton.run(
        *(ENVIRONMENT / "bin/lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={one}" for name, one in arguments.items())),
        *("--tasks", "choose,say", "--include_path", tasks, "--output_path", "results"),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
    )
    (file,) = (baton.directory / "results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["choose"]["acc,none"] == 1.0
    assert results["say"]["exact_match,none"] == 1.0
