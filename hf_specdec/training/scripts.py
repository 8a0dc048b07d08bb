"""Conversations split into given tokens and tokens that the target writes, from the pieces of a chat template."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ScriptPart:
    """
    One part of a conversation: given tokens, then tokens that the target writes.

    Args:
        given (`tuple[int, ...]`): tokens inserted before the written ones.
        writer (`str`): role of the written tokens: "user", "assistant", or "text" where there are no turns.
        ends (`frozenset[int]`): tokens that end the written tokens.
        keeps_end (`bool`): whether the end token is kept; if not, the next part's `given` begins with one.
        may_be_empty (`bool`): whether the target may write nothing, because `given` has content already.
    """

    given: tuple[int, ...]
    writer: str
    ends: frozenset[int] = field(default_factory=frozenset)
    keeps_end: bool = True
    may_be_empty: bool = False


class Template:
    """
    The pieces of a tokenizer's chat template, found by rendering two turns around place-holders.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer. Without a chat template, texts begin with the
            BOS token and are written freely.
        target (`PreTrainedModel`): the target; its generation config has the end tokens.

    Raises:
        ValueError: for a template that does not render the content of a turn, or a tokenizer with neither a chat
            template nor a BOS token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel):
        self.tokenizer = tokenizer
        ends = target.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or [])
        self.ends = frozenset(ends + ([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []))
        self.chats = tokenizer.chat_template is not None
        if not self.chats:
            first = tokenizer.bos_token_id
            first = target.config.get_text_config(decoder=True).bos_token_id if first is None else first
            if first is None:
                raise ValueError(
                    "`self_generate`: the target's tokenizer has neither a chat template nor a BOS token to begin a "
                    "text with. Give `data` or `prompts`."
                )
            self._begin = (int(first),)
            return
        self._prefix, self._to_answer, self._to_user = self._pieces()

    def _pieces(self) -> tuple[tuple[int, ...], ...]:
        words = ["QXJZFIRST", "QXJZSECOND", "QXJZTHIRD"]
        roles = ["user", "assistant", "user"]
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        whole = self.tokenizer.apply_chat_template(messages, tokenize=False)
        once = self.tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        if words[0] not in once or any(word not in whole for word in words):
            raise ValueError(
                "`self_generate`: the target's chat template does not show what a user says. Give `data` instead."
            )
        prefix, to_answer = once.split(words[0], 1)
        to_user = whole.split(words[1], 1)[1].split(words[2], 1)[0]
        encode = self.tokenizer
        return tuple(
            tuple(encode(piece, add_special_tokens=False)["input_ids"]) for piece in (prefix, to_answer, to_user)
        )

    def both_sides(self, turns: int = 1, opening: str = "") -> list[ScriptPart]:
        """
        A conversation of which the target writes both sides.

        Args:
            turns (`int`, *optional*, defaults to 1): questions, each with an answer.
            opening (`str`, *optional*): beginning, or the whole, of the first question (of the text, without a chat
                template).

        Returns:
            `list[ScriptPart]`: two parts per turn, or one part without a chat template.
        """
        opened = tuple(self.tokenizer(opening, add_special_tokens=False)["input_ids"]) if opening else ()
        if not self.chats:
            return [ScriptPart(self._begin + opened, "text", self.ends)]
        parts = []
        for turn in range(turns):
            given = self._prefix + opened if turn == 0 else _without_first(self._to_user, self.ends)
            user_ends = self.ends | ({self._to_answer[0]} if self._to_answer else frozenset())
            parts.append(
                ScriptPart(given, "user", user_ends, keeps_end=False, may_be_empty=turn == 0 and bool(opened))
            )
            parts.append(ScriptPart(self._to_answer, "assistant", self.ends))
        return parts

    def answer(self, messages: list[dict[str, str]] | None, text: str | None = None) -> list[ScriptPart]:
        """
        A single part: the target answers `messages`, or continues plain text, which is `text` or, without a chat
        template, the content of the last message.
        """
        if messages is not None and self.chats:
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            text = text if messages is None else messages[-1]["content"]
            ids = self.tokenizer(text)["input_ids"]
        return [ScriptPart(tuple(ids), "assistant" if self.chats else "text", self.ends)]


def _without_first(ids: tuple[int, ...], ends: frozenset[int]) -> tuple[int, ...]:
    """Token ids without a leading end token: an answer already keeps the one that `_to_user` begins with."""
    return ids[1:] if ids and ids[0] in ends else ids
