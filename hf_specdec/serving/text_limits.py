"""The longest text that may fit into a model's context, which is known without tokenising it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .errors import RequestRefused


_SAMPLES = (" ", "\n", "\t", "\u0378", "\u200b", "e\u0301", "\ufb03", "语")
"""Characters of which tokenizers are known that drop them, or merge any number of them into one token."""


@dataclass(frozen=True)
class TextLimit:
    """
    The most bytes of a prompt.

    Args:
        most_tokens (`int`): most tokens of a text.
        longest_token (`int`, *optional*): bytes of the longest text that one token stands for; None if there is no
            such bound.
    """

    most_tokens: int
    longest_token: int | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, most_tokens: int) -> TextLimit:
        """The limit for texts of at most `most_tokens` tokens."""
        longest = longest_entry(tokenizer)
        return cls(most_tokens, longest if _is_bound(tokenizer, longest) else None)

    @property
    def most_bytes(self) -> int | None:
        """Most bytes of a text; None if there is no bound. A text that is longer has more tokens than may be."""
        return None if self.longest_token is None else (self.most_tokens + 1) * self.longest_token

    def check(self, text: str) -> None:
        """
        Checks that a text may fit.

        Raises:
            RequestRefused: if it has too many tokens, whichever they are.
        """
        most, length = self.most_bytes, len(text.encode(errors="replace"))
        if most is not None and length > most:
            raise RequestRefused(
                f"The prompt has {length} bytes, but {self.most_tokens} tokens are the most that fit, and have "
                f"{self.most_tokens * (self.longest_token or 0)} bytes at most. Shorten it."
            )


def longest_entry(tokenizer: PreTrainedTokenizerBase) -> int:
    """Bytes of the longest text that an entry of the vocabulary stands for."""
    longest = 1
    # No entry is written shorter than its text: a byte is written as a character, and a space as `▁`.
    for entry, token in sorted(tokenizer.get_vocab().items(), key=lambda item: -_bytes_of(item[0])):
        if _bytes_of(entry) <= longest:
            break
        one, two = (_bytes_of(tokenizer.decode([token] * number)) for number in (1, 2))
        longest = max(longest, one, two - one)  # at its beginning a text loses a space
    return longest


def _is_bound(tokenizer: PreTrainedTokenizerBase, longest: int) -> bool:
    """Whether no token stands for more bytes: the tokenizer neither drops characters nor merges unknown ones."""
    for sample in _SAMPLES:
        text = "a" + sample * (2 * longest + 8) + "a"
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) * longest < _bytes_of(text):
            return False
    return True


def _bytes_of(text: str) -> int:
    return len(text.encode(errors="replace"))
