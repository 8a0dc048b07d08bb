"""A tokenizer for the tiny models of `support.models`: one piece of text for each of their tokens."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from .models import VOCAB


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """
    A byte-level tokenizer of 61 tokens: four special ones, the letters, and pieces of two letters, most of which start
    a word. Any text of lower-case letters can be encoded; there are no merges, so that it comes out as letters.
    """
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    letters = list(string.ascii_lowercase)
    pieces = [f"Ġ{letter}{letter}" for letter in letters] + ["ab", "ba", "Ġ", ".", "Ċ"]
    vocab = {piece: token for token, piece in enumerate(special + letters + pieces)}
    assert len(vocab) == VOCAB
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
