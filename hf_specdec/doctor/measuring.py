"""Agreement of a head with its target, along text that the target writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..benchmarking.contenders import GREEDY
from ..benchmarking.prompts import encode_turns
from ..drafters import EagleDrafter
from ..drafters.heads import Borrowed, borrowed_lm_head
from ..eagle import EagleHead
from ..eagle.unroll import unroll
from ..forwards.features import watch_features
from ..metrics import metrics_of_last_call
from ..models.structure import execution_device, keeping_one_logit


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
    """

    text: Text
    features: dict[int, torch.Tensor]
    last: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, text: Text, heads: list[EagleHead], target: PreTrainedModel) -> ReadText:
        """Forwards the target once over a text, for all heads, which are of one dtype."""
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        watched = sorted(set().union(*(head.config.aux_boundaries(num_layers) for head in heads)))
        with watch_features(target, watched) as features:
            target(text.ids[None], use_cache=False, **keeping_one_logit(target))
        taken = features.take(torch.device("cpu"), heads[0].dtype)
        if not watched:
            return cls(text, {}, taken)
        return cls(text, dict(zip(watched, taken.chunk(len(watched), dim=-1), strict=True)), taken[:, :0])


@torch.no_grad()
def hits_on(read: ReadText, head: EagleHead, target: PreTrainedModel, depth: int) -> torch.Tensor:
    """
    Hits of chains that start after every new token and draft the tokens of the text: whether the head's best token is
    the target's.

    A greedy chain of row r accepts as many tokens as the row has hits before its first miss.

    Args:
        read (`ReadText`): a text with more than `depth` new tokens, read for this head.
        head (`EagleHead`): the head.
        target (`PreTrainedModel`): its target, whose embeddings and lm_head it may use.
        depth (`int`): length of the chains.

    Returns:
        `torch.Tensor`: `[rows, depth]` bool; row r is the chain whose root is new token r.
    """
    text, ids = read.text, read.text.ids.to(head.device)
    layers = head.config.aux_boundaries(target.config.get_text_config(decoder=True).num_hidden_layers)
    features = torch.cat([read.features[layer] for layer in layers], dim=-1) if layers else read.last
    features = features.to(head.device)
    embed = Borrowed(target.get_input_embeddings(), target.dtype) if head.embed_tokens is None else head.embed_tokens
    lm_head = borrowed_lm_head(head, target) if head.lm_head is None else head.lm_head
    first, last = text.prompt_length - 1, len(ids) - 1 - depth  # rows whose next token the target wrote
    hits = []
    for step, states in enumerate(unroll(head, features, embed(ids[None]).to(head.dtype), depth)):
        best = lm_head(states[0, first:last]).argmax(dim=-1)
        best = best if head.target_ids is None else head.target_ids[best]
        hits.append(best == ids[first + 2 + step : last + 2 + step])
    return torch.stack(hits, dim=1)


def tree_acceptance_length(head: EagleHead, target: PreTrainedModel, texts: list[Text]) -> float:
    """Tokens per step, the bonus token included, when the texts are generated again with the head's default tree."""
    accepted = drafts = 0
    for text in texts:
        ids = text.ids[None, : text.prompt_length]
        options = {"max_new_tokens": text.num_new_tokens, "tree": EagleDrafter(head).default_tree, **GREEDY}
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, **options)
        metrics = metrics_of_last_call()
        accepted, drafts = accepted + metrics.num_accepted_tokens, drafts + metrics.num_drafts
    return 1 + accepted / max(drafts, 1)
