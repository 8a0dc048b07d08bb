"""Text on the terminal while it is generated."""

from __future__ import annotations

import torch
import typer
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..serving.text_pieces import TextPieces


class PrintedText(BaseStreamer):
    """
    A streamer that prints the new text of one row, without special tokens. All that it prints is the text that the
    tokens are decoded to, and a line break.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._pieces: TextPieces | None = None

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, and then new tokens."""
        if self._pieces is None:
            self._pieces = TextPieces(self._tokenizer, skip_special_tokens=True)
            return
        for token in value.flatten().tolist():
            typer.echo(self._pieces.add(token), nl=False)

    def end(self) -> None:
        """Ends the text; another may follow."""
        typer.echo("" if self._pieces is None else self._pieces.rest())
        self._pieces = None
