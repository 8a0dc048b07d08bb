"""
What a block head makes of a position's logits once the token before it is known: Markov head, candidate selector; and
the estimate of its acceptance.

Tokens before are *target* ids; logits are over the draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from .configuration_block import BlockConfig


class MarkovHead(nn.Module):
    """
    Adds to a position's logits what the token before it tells (deepseek-ai/DeepSpec, `markov_head.py`): with its
    embedding e = W1[p] of rank r, "vanilla" adds W2 e; "gated" W2 (sigmoid(G [h; e]) * e), where h is the position's
    state; "rnn" W2 tanh(o), where (g, t, o) = J [z; e; h] and a state z, zeros at the anchor, goes on as
    sigmoid(g) z + (1 - sigmoid(g)) tanh(t).
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_tokens, bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if config.markov_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if config.markov_type == "rnn" else None

    def forward(
        self, states: torch.Tensor, parents: torch.Tensor, carried: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            states (`torch.Tensor` of shape `[batch, nodes, H]`): the states of the positions after the nodes.
            parents (`torch.Tensor` of shape `[batch, nodes]`, int64): the nodes' tokens.
            carried (`torch.Tensor` of shape `[batch, nodes, r]`, *optional*): z of the nodes; None at the anchor.

        Returns:
            `tuple`: what is added to the logits, `[batch, nodes, draft vocab]`, and z for the nodes' children (None
            but for "rnn").
        """
        if self.joint_proj is None:
            return self.markov_w2(self.queries(states, parents)), None
        embeddings = self.markov_w1(parents)
        z = torch.zeros_like(embeddings) if carried is None else carried
        gate, candidate, output = self.joint_proj(torch.cat([z, embeddings, states], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self.markov_w2(output.tanh()), gate * z + (1 - gate) * candidate.tanh()

    @property
    def keys(self) -> torch.Tensor | None:
        """
        For every token the vector whose product with `queries` its logit gains, `[draft vocab, r]`; None where there
        is none, as for "rnn", where the whole path tells.
        """
        layers = (self.markov_w2,) if self.gate_proj is None else (self.markov_w2, self.gate_proj)
        if self.joint_proj is not None or any(type(layer) is not nn.Linear for layer in layers):  # quantised, say
            return None
        return self.markov_w2.weight

    def queries(self, states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """
        What tokens after `parents` gain, `[…, r]`, to be multiplied with their `keys`; but for "rnn". `states` may
        have one node for all of a position's parents.
        """
        embeddings = self.markov_w1(parents)
        if self.gate_proj is None:
            return embeddings
        if states.shape[:-1] == parents.shape:
            return self.gate_proj(torch.cat([states, embeddings], dim=-1)).sigmoid() * embeddings
        of_states, of_parents = self.gate_proj.weight.split([states.shape[-1], embeddings.shape[-1]], dim=1)
        gates = linear(states, of_states, self.gate_proj.bias) + linear(embeddings, of_parents)
        return gates.sigmoid() * embeddings


class CandidateSelector(nn.Module):
    """
    Scores the most likely tokens of a position by the token before it (z-lab/dflash, DFlash 2): the score of candidate
    b after token p is its logit plus ⟨P[p] * (W h), N[b]⟩, where h is the position's state.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        rank = config.selector_rank
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.num_draft_tokens, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, base: torch.Tensor, states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """
        Scores `[batch, nodes, draft vocab]`, float32: -inf but for the `top_k` largest of `base`.

        Args:
            base (`torch.Tensor` of shape `[batch, nodes, draft vocab]`): logits of the positions after the nodes.
            states (`torch.Tensor` of shape `[batch, nodes, H]`): their states.
            parents (`torch.Tensor` of shape `[batch, nodes]`, int64): the nodes' tokens.
        """
        logits, candidates = base.float().topk(self.top_k, dim=-1)
        transitions = (self.queries(states, parents)[..., None, :] * self.keys[candidates]).sum(dim=-1)
        scores = torch.full_like(base, -torch.inf, dtype=torch.float32)
        return scores.scatter(-1, candidates, (logits + transitions).float())

    @property
    def keys(self) -> torch.Tensor:
        """As of `MarkovHead`."""
        return self.successor_codebook

    def queries(self, states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """As of `MarkovHead`."""
        return self.predecessor_codebook[parents] * self.hidden_projection(states)


class ConfidenceHead(nn.Module):
    """
    Estimates the probability that a position's token is accepted if those before it are, from the position's state
    and, where the head was trained so, the Markov embedding of the token before (deepseek-ai/DeepSpec,
    `AcceptRatePredictor`).
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.confidence_with_markov * config.markov_rank, 1)

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor | None) -> torch.Tensor:
        """Logits `[batch, nodes]` for states `[batch, nodes, H]` and embeddings `[batch, nodes, r]`."""
        inputs = states if embeddings is None else torch.cat([states, embeddings], dim=-1)
        return self.proj(inputs)[..., 0]
