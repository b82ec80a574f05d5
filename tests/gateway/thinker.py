"""A tokenizer with tokens for the begin and end of reasoning."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from baton import models

THINK, ANSWER = "<think>", "</think>"


def write_thinker(directory: Path) -> None:
    """Writes the files of the tokenizer."""
    source = Path(models.__file__).parent / "glossary"
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens([THINK, ANSWER])
    tokenizer.save(str(directory / "tokenizer.json"))
