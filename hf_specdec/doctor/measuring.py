"""Agreement of a head with its target, along text that the target writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..benchmarking.contenders import GREEDY
from ..benchmarking.prompts import encode_turns
from ..drafters import as_drafter
from ..forwards.features import watch_features
from ..gemma import GemmaAssistant
from ..metrics import metrics_of_last_call
from ..models.structure import execution_device, keeping_one_logit
from .along_text import Head, Rows, logits_along
from .assistants import TextKV, read_text


LEAST = -15.0
"""The lowest log-probability that counts: one token that a head would never draft weighs no more than that."""


@dataclass(frozen=True, eq=False)
class Text:
    """
    A prompt and the target's greedy answer.

    Args:
        ids (`torch.Tensor` of shape `[tokens]`, int64): tokens of the prompt and the answer.
        prompt_length (`int`): number of tokens of the prompt.
    """

    ids: torch.Tensor
    prompt_length: int

    @property
    def num_new_tokens(self) -> int:
        return len(self.ids) - self.prompt_length


def write(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int) -> Text:
    """The target's greedy answer to a prompt, with the tokenizer's chat template if it has one."""
    ids = encode_turns(tokenizer, [prompt])["input_ids"].to(execution_device(target))
    text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **GREEDY)
    return Text(text[0], ids.shape[1])


@dataclass(frozen=True, eq=False)
class ReadText:
    """
    A text, and what a target computes over it.

    Args:
        text (`Text`): the text.
        features (`dict[int, torch.Tensor]`): hidden states by boundary, `[1, tokens, Ht]` each, on the CPU.
        last (`torch.Tensor` of shape `[1, tokens, Ht]`): the last hidden state after the final norm; empty where the
            heads read boundaries.
        shared (`dict`): what assistants of Gemma 4 attend to, on the CPU; empty for other heads.
    """

    text: Text
    features: dict[int, torch.Tensor]
    last: torch.Tensor
    shared: TextKV = field(default_factory=dict)

    def rows(self, head: Head, target: PreTrainedModel, depth: int) -> Rows:
        """What a head reads along the text, for chains of `depth` tokens after every new token."""
        layers = head.config.aux_boundaries(target.config.get_text_config(decoder=True).num_hidden_layers)
        features = torch.cat([self.features[layer] for layer in layers], dim=-1) if layers else self.last
        return Rows.of(head, target, self.text.ids, features, self.text.prompt_length, depth, self.shared)

    @classmethod
    @torch.no_grad()
    def of(cls, text: Text, heads: Sequence[Head], target: PreTrainedModel) -> ReadText:
        """Forwards the target once over a text, for all heads, which are of one dtype."""
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        watched = sorted(set().union(*(head.config.aux_boundaries(num_layers) for head in heads)))
        with watch_features(target, watched) as features:
            target(text.ids[None], use_cache=False, **keeping_one_logit(target))
        taken = features.take(torch.device("cpu"), heads[0].dtype)
        if not watched:
            reads_kv = isinstance(heads[0], GemmaAssistant)
            return cls(text, {}, taken, read_text(target, text.ids) if reads_kv else {})
        return cls(text, dict(zip(watched, taken.chunk(len(watched), dim=-1), strict=True)), taken[:, :0])


@dataclass(frozen=True, eq=False)
class Chains:
    """
    Chains that start after every new token of a text and draft the text's tokens.

    Args:
        hits (`torch.Tensor` of shape `[rows, depth]`, bool): whether the head's best token is the target's. A greedy
            chain of row r accepts as many tokens as the row has hits before its first miss.
        log_probs (`torch.Tensor` of shape `[rows, depth]`, float32): the head's log-probability of the target's token,
            at least `LEAST`; NaN where that is not in the draft vocabulary.
    """

    hits: torch.Tensor
    log_probs: torch.Tensor


@torch.no_grad()
def chains_on(read: ReadText, head: Head, target: PreTrainedModel, depth: int) -> Chains:
    """
    Measures a head along a text; row r of the result is the chain whose root is new token r.

    Args:
        read (`ReadText`): a text with more than `depth` new tokens, read for this head.
        head (`EagleHead`, `BlockHead` or `GemmaAssistant`): the head.
        target (`PreTrainedModel`): its target, whose embeddings and lm_head it may use.
        depth (`int`): length of the chains.
    """
    rows = read.rows(head, target, depth)
    hits, log_probs = [], []
    for step, (drafted, logits) in enumerate(logits_along(head, rows)):
        tokens, best = rows.tokens(step), drafted.argmax(dim=-1)
        hits.append((best if head.target_ids is None else head.target_ids[best]) == tokens)
        log_probs.append(log_probs_of(head, logits, tokens))
    return Chains(torch.stack(hits, dim=1), torch.stack(log_probs, dim=1))


def log_probs_of(head: Head, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[rows]` of the target's `tokens` `[rows]` by `logits` `[rows, draft vocab]`, see `Chains`."""
    known = None
    if head.target_ids is not None:
        index = torch.full((head.config.vocab_size,), -1, device=tokens.device)
        index[head.target_ids] = torch.arange(len(head.target_ids), device=tokens.device)
        tokens = index[tokens]
        known, tokens = tokens >= 0, tokens.clamp(min=0)
    found = logits.float().log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0].clamp(min=LEAST)
    return found if known is None else found.where(known, torch.nan)


def tree_acceptance_length(head: Head, target: PreTrainedModel, texts: list[Text]) -> float:
    """Tokens per step, the bonus token included, when the texts are generated again with the head's default tree."""
    accepted = drafts = 0
    for text in texts:
        ids = text.ids[None, : text.prompt_length]
        options = {"max_new_tokens": text.num_new_tokens, "tree": as_drafter(head).default_tree, **GREEDY}
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, **options)
        metrics = metrics_of_last_call()
        accepted, drafts = accepted + metrics.num_accepted_tokens, drafts + metrics.num_drafts
    return 1 + accepted / max(drafts, 1)
