"""What `hf-specdec demo` prints while it generates."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hf_specdec.cli.printed_text import PrintedText


def test_all_of_a_text_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that begins with a space, and bytes that only the next one breaks."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b"]
    backend = Tokenizer(BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    names = ["▁a", "<0x0A>", "▁a", "<0xE4>", "<0xBD>", "<0xA0>", "<0x9B>", "b", "</s>", "<0xE4>"]
    streamer, ids = PrintedText(tokenizer), tokenizer.convert_tokens_to_ids(names)
    for _ in range(2):
        streamer.put(torch.tensor([[5, 6]]))
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert capsys.readouterr().out == f"{text}\n" * 2 and text == "a\n a����b�"
