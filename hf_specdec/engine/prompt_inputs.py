"""What a model reads beside the tokens of prompts, such as images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


LEAST_LEAD = 16
"""Fewest tokens before or behind an image that are read by themselves."""


class Content(NamedTuple):
    """
    What the inputs of a prompt say, and where: of two prompts that are equal up to the end, with equal digests, the
    model makes the same there, and what follows is text.

    Args:
        digest (`bytes`): SHA-256 of the inputs.
        first, end (`int`): where the tokens for which they stand begin and end.
        parts (`tuple[Content, ...]`): the same of each image, if there are several with text between them, and the
            inputs can be told apart; each with the tokens up to its end. Else empty.
    """

    digest: bytes
    first: int
    end: int
    parts: tuple[Content, ...] = ()

    def num_held(self, length: int) -> int:
        """How many of the images are in the first `length` tokens."""
        return sum(part.end <= length for part in self.parts)

    def digest_at(self, end: int, leads: Leads) -> bytes:
        """
        What the inputs say of the tokens before `end`, beside these: all of them from the first token on, where text
        before images may be read otherwise because of these, and from the first image on where one may be so because
        of another.
        """
        parts = self.parts if leads.more is not False else ()
        has_lead = self.first >= LEAST_LEAD and leads.work is not False
        return b"".join(
            part.digest
            for number, part in enumerate(parts or (self,))
            if part.first < end or (number == 0 and not has_lead)
        )


@dataclass(eq=False)
class Leads:
    """
    Whether the text around a prompt's images may be read apart from them, as other texts; and so whether other prompts
    may have its K/V, or those of its images. One for all prompts of a model.

    Args:
        work (`bool`, *optional*): whether the model reads images behind text that was read before as together with it;
            None if not known yet.
        end (`bool`, *optional*): whether it reads a prompt up to its images as with the text behind them.
        more (`bool`, *optional*): whether it reads further images behind those that were read before as together with
            them.
    """

    work: bool | None = None
    end: bool | None = None
    more: bool | None = None

    @property
    def refused(self) -> tuple[bool, ...]:
        """What was found not to work: keys of blocks depend on it."""
        return self.work is False, self.end is False, self.more is False


@dataclass(eq=False)
class PromptInputs:
    """
    Inputs of a prompt beside its tokens. The model reads such a prompt as in plain `generate`: whole, or from its
    first image on, and to its end, or to the last image at least; and alone, or together with others that have the
    same `PromptInputs`.

    Args:
        values (`dict[str, Any]`): keyword arguments of the model's forward. Their tensors lie on the host: many
            requests may wait.
        prepare (`Callable`): called with `values` when the prompt is read, and with a number of tokens if only so many
            are; returns the generation config and keyword arguments that `generate` hands to a decoding method.
        tokens (`torch.Tensor` of shape `[requests, columns]`, int64, *optional*): the prompts of all requests, padded
            on the left, as the model reads them. None for the one request's own.
        content (`Content`, *optional*): what the prompt may share with others; None if it shares nothing.
        leads (`Leads`): whether the text before `content` may be read before it.
        prepare_start (`Callable`, *optional*): called with a number of tokens; returns what `prepare` returns for a
            prompt of the first so many alone, as a text. None: nothing is read before the rest.
    """

    values: dict[str, Any]
    prepare: Callable[[dict[str, Any], int | None], tuple[Any, dict[str, Any]]]
    tokens: torch.Tensor | None = None
    content: Content | None = None
    leads: Leads = field(default_factory=Leads)
    prepare_start: Callable[[int], tuple[Any, dict[str, Any]]] | None = None
    prepare_more: Callable[..., tuple[Any, dict[str, Any]]] | None = None
    """
    As `prepare`, called with `values`, how many images and how many tokens have been read, and the number of tokens
    that then will have been; and the number of images, if it is not all.
    """

    def num_usable(self, length: int, size: int) -> int:
        """
        For how many of the first `length` tokens of the prompt blocks of `size` tokens can be taken over from others:
        no half images.
        """
        content = self.content
        if content is None:
            return 0
        if not self.leads.end:  # images may be read otherwise because of the text behind them
            return min(length, self.num_lead)
        if length >= content.end:
            return length
        for number in range(content.num_held(length) if self.leads.more else 0, 0, -1):
            found = min(length, content.parts[number].first) // size * size
            if found >= content.parts[number - 1].end:
                return found
        return min(length, self.num_lead)

    @property
    def has_lead(self) -> bool:
        """Whether so much text comes before `content` that reading it by itself may be worth a forward more."""
        is_wanted = self.content is not None and self.content.first >= LEAST_LEAD
        return is_wanted and self.prepare_start is not None

    @property
    def num_lead(self) -> int:
        """Tokens at the start of the prompt that are read as text, before the rest."""
        return self.content.first if self.content is not None and self.has_lead and self.leads.work else 0

    def end_of_whole(self, num_tokens: int, first: int, most: int) -> int:
        """
        The end of what is read in one forward with the images.

        Args:
            num_tokens (`int`): tokens of the prompt.
            first (`int`): those that have been read.
            most (`int`): most to be read at once, if images let them.
        """
        if self.content is None or not self.leads.end:
            return num_tokens
        end = max(self.content.end, first + most)
        return end if num_tokens - end >= LEAST_LEAD else num_tokens


def is_by_token(value: Any, num_tokens: int) -> bool:
    """Whether an input has an integer for each token of a prompt."""
    is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
    return is_tensor and not value.is_floating_point() and value.numel() == value.shape[-1] == num_tokens
