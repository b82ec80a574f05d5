"""Writes a small random model of BERT's kind, which embeds texts."""

from __future__ import annotations

from pathlib import Path

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["what", "is", "a", "kv", "cache", "flip", "time", "to", "first", "token", "?", "."]
MAX_TOKENS, HIDDEN_SIZE = 128, 64


def write(directory: Path) -> None:
    """Writes the model and its tokenizer into a directory."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    special = {f"{name}_token": word for name, word in zip(names, SPECIAL, strict=True)}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, **special
    ).save_pretrained(directory)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_TOKENS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(directory)
