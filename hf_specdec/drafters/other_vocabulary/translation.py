"""What two vocabularies share, and texts of one in the tokens of the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .pairs import OfPairs
from .pieces import TokenPieces, split_text


SAMPLE = """The harbour was quiet when the first boats came back. Anna had counted eleven of them, although her
brother said there should be twelve. "Maybe one went north," he answered, and put the letter (dated 14 March 1987)
back into his coat. Why do people return to places that they have left? In general, the answer depends on what they
hope to find there: work, friends, or simply something they already know.

def average(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else None

1. Heat the oven to 180 degrees.  2. Mix the flour, sugar and two eggs.  3. Bake for about 25 minutes.
"""
"""A text of our own, whose tokens say how often a target writes tokens that the draft has, too."""
_MOST_KNOWN = 64
"""Most pieces of text whose tokens are kept."""


class Translation:
    """
    The tokens that a target and a draft share, by their bytes, and special ones by name or else by role (bos, eos).
    Each target token has at most one draft token, and each draft token one target token: of several with the same
    bytes the first counts, the others are dropped.

    Args:
        target (`TokenPieces`), draft (`TokenPieces`): their tokens.

    Raises:
        ValueError: if they share no text.
    """

    def __init__(self, target: TokenPieces, draft: TokenPieces):
        self.target, self.draft = target, draft
        pairs = {token: draft.tokens[piece] for piece, token in target.tokens.items() if piece in draft.tokens}
        self.num_texts = len(pairs)
        """Number of shared tokens that are text."""
        if not pairs:
            raise ValueError(
                "`assistant_tokenizer`: its tokens share no text with those of `tokenizer`, so that the draft can "
                "propose nothing. Use a draft model whose vocabulary has some of the target's tokens."
            )
        self.special = _pairs_of_special(target, draft)
        pairs |= self.special
        ordered = sorted(pairs)
        self.target_tokens = torch.tensor(ordered, device="cpu")
        """The shared tokens as the target numbers them, in order, `[shared]` int64."""
        self.draft_tokens = torch.tensor([pairs[token] for token in ordered], device="cpu")
        """Shared tokens as the draft numbers them, in the same order, `[shared]` int64."""
        self.share_of_vocabulary = self.num_texts / len(target.tokens)
        """Share of the target's tokens that the draft has."""
        self.share_of_text, self.tokens_ratio = self._shares_of_text()
        self.encoded: Callable[[bytes, bool, bool], list[int]] = lru_cache(maxsize=_MOST_KNOWN)(self._encode)
        """
        The draft's tokens of a piece of the target's text without shared special ones. The piece may be the first of
        the text (`is_first`), or go on with the one before it (`goes_on`).
        """

    @classmethod
    def of(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        assistant_tokenizer: PreTrainedTokenizerBase,
    ) -> Translation:
        """
        The translation between the tokenizers of a target and a draft, which is made once.

        Raises:
            TypeError, ValueError: for tokenizers whose tokens cannot be compared, or share nothing.
        """
        sizes = tuple(model.config.get_text_config(decoder=True).vocab_size for model in (target, draft))

        def make() -> Translation:
            mine = TokenPieces(tokenizer, sizes[0], "tokenizer")
            return cls(mine, TokenPieces(assistant_tokenizer, sizes[1], "assistant_tokenizer"))

        return _translations.get((tokenizer, assistant_tokenizer), sizes, make)

    def _shares_of_text(self) -> tuple[float, float]:
        """
        Share of the target's tokens in `SAMPLE` that the draft has (of its vocabulary, if it cannot write the sample),
        and how many tokens of the draft there are to one of the target.
        """
        tokens = [token for token in self.target.encode(SAMPLE) if self.target.pieces[token]]
        if self.target.bytes_of(tokens).strip() != SAMPLE.encode().strip():
            return self.share_of_vocabulary, 1.0
        shared = set(self.target_tokens.tolist())
        num_draft = sum(bool(self.draft.pieces[token]) for token in self.draft.encode(SAMPLE))
        return sum(token in shared for token in tokens) / len(tokens), num_draft / len(tokens)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a target's token, of a special one its name; none of an id that is no token."""
        pieces = self.target.pieces
        return (pieces[token] or self.target.special.get(token, "").encode()) if token < len(pieces) else b""

    def _encode(self, piece: bytes, is_first: bool, goes_on: bool) -> list[int]:
        if (is_first and self.target.begins_with_space) or (goes_on and self.draft.begins_with_space):
            piece = piece.removeprefix(b" ")
        text, rest = split_text(piece)
        bytes_left = [self.draft.tokens.get(bytes([byte])) for byte in rest]
        return self.draft.encode(text) + [token for token in bytes_left if token is not None]

    # ----------------------------------------------------------------------------------------------------- new texts

    def written(self, before: list[int], tokens: list[int]) -> list[int]:
        """
        What the draft has written (`tokens`) in the target's tokens, after the last ones of a text (`before`); up to
        the first special token, which is the last of them, if the target has it.
        """
        special = next((place for place, token in enumerate(tokens) if token in self.draft.special), len(tokens))
        text, _ = split_text(self.draft.bytes_of(tokens[:special]))
        found = self._continued(before, text)
        if special < len(tokens):
            found += [mine for mine, its in self.special.items() if its == tokens[special]][:1]
        return found

    def _continued(self, before: list[int], text: str) -> list[int]:
        """The target's tokens for new text, as they come after the last tokens of the text before."""
        context, _ = split_text(self.target.bytes_of(before))
        start, whole = self.target.encode(context), self.target.encode(context + text)
        if whole[: len(start)] == start:
            return whole[len(start) :]
        return [] if self.target.begins_with_space else self.target.encode(text)


_translations: OfPairs[Translation] = OfPairs()


def _pairs_of_special(target: TokenPieces, draft: TokenPieces) -> dict[int, int]:
    """Special tokens of the target with those of the draft: of the same name, and the others by role."""
    named = {name: token for token, name in draft.special.items()}
    pairs = {token: named[name] for token, name in target.special.items() if name in named}
    for role, token in target.roles.items():
        its = draft.roles.get(role)
        if its is not None and token not in pairs and its not in pairs.values():
            pairs[token] = its
    return pairs
