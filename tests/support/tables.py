"""
Language models that are tables, and recursive rejection enumerated by hand: what unit tests of the sampling hold
against the library, many thousand rows at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specdec.drafters import growth
from hf_specdec.engine.request_options import RequestOptions
from hf_specdec.generation.recording import Recorder
from hf_specdec.generation.rows import CallRows
from hf_specdec.sequences import Sequences
from hf_specdec.trees import DraftTree, DynamicTree, TokenTree, Topology
from hf_specdec.verification import TargetDistribution, Walk, rejection, target


@dataclass(frozen=True)
class TableModel:
    """
    A language model whose next token depends on how many tokens came since the root, and on the last of them.

    Args:
        scores (`torch.Tensor` of shape `[levels, vocab, vocab]`, float32):
            Log-probabilities up to a constant; the root's are `scores[0, 0]`.
    """

    scores: torch.Tensor

    @classmethod
    def random(cls, levels: int, vocab: int, sharpness: float, seed: int, support: int | None = None) -> TableModel:
        """Normal scores, `sharpness` wide; with `support`, all but the best so many tokens are impossible."""
        generator = torch.Generator().manual_seed(seed)
        scores = sharpness * torch.randn(levels, vocab, vocab, generator=generator)
        if support is not None:
            scores = scores.masked_fill(scores < scores.topk(support, dim=-1).values[..., -1:], -torch.inf)
        return cls(scores)

    @property
    def root(self) -> torch.Tensor:
        """Scores at the root, `[vocab]`."""
        return self.scores[0, 0]

    def joint(self, length: int) -> torch.Tensor:
        """The distribution of `length` tokens behind the root, `[vocab] * length` float64."""
        joint = self.root.double().softmax(dim=-1)
        for level in range(1, length):
            joint = joint[..., None] * self.scores[level].double().softmax(dim=-1)
        return joint

    def run_level(self, nodes: growth.LevelNodes) -> torch.Tensor:
        """What a draft model's forward of one level gives."""
        return self.scores[nodes.node_depths[:, -nodes.tokens.shape[1] :] + 1, nodes.tokens]

    def grow(self, tree: TokenTree | DynamicTree, rows: int, depth: int = 99) -> DraftTree:
        """`rows` trees with children drawn from this model."""
        root = self.root.expand(rows, -1)
        return growth.grow(tree, root, self.run_level, depth, warp_if_drawn=lambda logits: logits)

    def grow_best(self, tree: TokenTree | DynamicTree, rows: int) -> DraftTree:
        """`rows` trees of this model's best tokens."""
        root = self.root.expand(rows, -1)
        if isinstance(tree, DynamicTree):
            return growth.grow(tree, root, self.run_level, depth=99)
        return growth.grow_static(tree, root, self.run_level)

    def score(self, draft: DraftTree) -> torch.Tensor:
        """
        The logits that this model as a target has at the root and all nodes of a draft, `[rows, nodes + 1, vocab]`.
        """
        tokens = torch.nn.functional.pad(draft.tokens, (1, 0))
        return self.scores[draft.topology.depths.clamp(max=len(self.scores) - 1), tokens]

    def finish(self, texts: list[list[int]], length: int) -> torch.Tensor:
        """Cuts texts behind the root to `length` tokens; shorter ones are continued with samples of this model."""
        done = torch.zeros(len(texts), length, dtype=torch.long)
        lengths = torch.tensor([len(text) for text in texts])
        for level in range(length):
            last = done[:, level - 1] if level else torch.zeros_like(lengths)
            done[:, level] = torch.multinomial(self.scores[level, last].double().softmax(dim=-1), 1)[:, 0]
            given = [text[level] if level < len(text) else -1 for text in texts]
            done[:, level] = torch.where(lengths > level, torch.tensor(given), done[:, level])
        return done


Verify = Callable[[DraftTree, TargetDistribution, list[int]], Walk]


def by_rejection(draft: DraftTree, distribution: TargetDistribution, rows: list[int]) -> Walk:
    """The library's `walk_by_rejection`, or what a test put in its place."""
    return rejection.walk_by_rejection(draft, distribution, rows)


def by_target(draft: DraftTree, distribution: TargetDistribution, rows: list[int]) -> Walk:
    """The library's `walk_target`, sampling."""
    return target.walk_target(draft, distribution, rows, do_sample=True)


def walk(draft: DraftTree, logits: torch.Tensor, verify: Verify) -> Walk:
    """Walks all rows down their trees, given the target's `logits` (`[rows, nodes + 1, vocab]`)."""
    rows = list(range(len(logits)))
    return verify(draft, call_rows([], torch.zeros(len(rows), 1, dtype=torch.long)).distribution(logits), rows)


def call_rows(processors: list, ids: torch.Tensor, visible: torch.Tensor | None = None) -> CallRows:
    """The rows of a sampling call with these prompts, of which nothing is recorded."""
    options = RequestOptions(LogitsProcessorList(processors), StoppingCriteriaList(), True, None)
    recorder = Recorder(len(ids), scores=False, logits=False, attentions=False, hidden_states=False)
    return CallRows(options, Sequences(ids, visible), recorder)


def fan(count: int) -> TokenTree:
    """A root with `count` children."""
    return TokenTree(tuple((rank,) for rank in range(count)))


def by_hand(tree: TokenTree, tokens: list[list[int]], scores: list[torch.Tensor]) -> DraftTree:
    """
    A draft tree written down by hand.

    Args:
        tokens (`list`): the tokens of every row, in the tree's order.
        scores (`list` of `torch.Tensor` of shape `[vocab]` or `[rows, vocab]`): of the nodes that have children, in
            order.
    """
    with_children = [node for node, children in enumerate(tree.children) if children]
    index = [with_children.index(node) if node in with_children else -1 for node in range(tree.num_nodes + 1)]
    stacked = torch.stack([one.expand(len(tokens), -1) for one in scores], dim=1)
    topology = Topology.of_tree(tree, torch.device("cpu"))
    return DraftTree(torch.tensor(tokens), topology, scores=stacked, score_index=[index])


# ------------------------------------------------------------------------------------ recursive rejection, enumerated


def ordered_draws(q: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Every order in which `count` tokens can be drawn from q one after the other without replacement, `[draws, count]`,
    -1 where q has no more; and how likely each is, `[draws]`.
    """
    support = np.flatnonzero(q)
    possible = min(count, len(support))
    drawn = np.array(list(itertools.permutations(support.tolist(), possible))).reshape(-1, possible)
    probability, rest = np.ones(len(drawn)), np.repeat(q[None], len(drawn), axis=0)
    for tokens in drawn.T:
        probability *= _at(rest, tokens) / rest.sum(axis=1)
        np.put_along_axis(rest, tokens[:, None], 0.0, axis=1)
    return np.pad(drawn, ((0, 0), (0, count - possible)), constant_values=-1), probability


def recursive_rejection(p: np.ndarray, q: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    The rule, for children drawn in the order of each row of `drawn` (`[draws, count]`).

    Returns:
        `tuple`: with which probability each child is accepted if the ones before it were refused, `[draws, count]`;
        and the distribution of the token if all are refused, `[draws, vocab]`.
    """
    p, q = (np.repeat(one[None], len(drawn), axis=0) for one in (p, q))
    acceptance = np.zeros(drawn.shape)
    for place, tokens in enumerate(drawn.T):
        counts = tokens >= 0
        tokens = np.maximum(tokens, 0)
        acceptance[:, place] = np.where(counts, ratio(_at(p, tokens), _at(q, tokens)), 0.0)
        p = np.where(counts[:, None], normalised(np.maximum(p - q, 0.0), otherwise=p), p)
        rest = q.copy()
        np.put_along_axis(rest, tokens[:, None], 0.0, axis=1)
        q = np.where(counts[:, None], normalised(rest, otherwise=rest), q)
    return acceptance, p


Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
Draws = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def token_law(
    p: np.ndarray, q: np.ndarray, count: int, rule: Rule = recursive_rejection, draws: Draws = ordered_draws
) -> tuple[np.ndarray, np.ndarray]:
    """
    What one node with `count` drawn children gives, by enumeration of all draws. (Wrong samplers have another `rule`,
    or get at their children by other `draws`.)

    Returns:
        `tuple`: the distribution of the token, `[vocab]`; and the probability that the first child is accepted, the
        second, …, and none of them, `[count + 1]`.
    """
    drawn, reach = draws(q, count)
    acceptance, rest = rule(p, q, drawn)
    law, places = np.zeros_like(p), np.zeros(count + 1)
    for place in range(count):
        accepted = reach * acceptance[:, place]
        np.add.at(law, np.maximum(drawn[:, place], 0), accepted)
        places[place] = accepted.sum()
        reach = reach - accepted
    places[count] = reach.sum()
    return law + reach @ rest, places


def ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """min(1, p / q), 1 where q is 0."""
    return np.minimum(p, q) / np.where(q > 0, q, 1.0) + (q <= 0)


def normalised(weights: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Weights `[draws, vocab]` as probabilities; `otherwise` where all are 0."""
    total = weights.sum(axis=1, keepdims=True)
    return np.where(total > 0, weights / np.where(total > 0, total, 1.0), otherwise)


def _at(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, tokens[:, None], axis=1)[:, 0]


TREES_OF_TABLES = {
    "chain": TokenTree.chain(3),
    "regular": TokenTree.from_branching((3, 2)),
    "irregular": TokenTree.parse("[(0,), (1,), (2,), (0,0), (0,1), (1,0), (0,0,0), (0,0,1), (1,0,0)]"),
    "only the last child has children": TokenTree.parse("[(0,), (1,), (2,), (2,0), (2,1), (2,1,0)]"),
    "budgets": DynamicTree(depth=3, top_k=3, num_nodes=9),
}
DRAFTS_OF_TABLES: dict[str, Callable[[TableModel, int], TableModel]] = {
    "close": lambda target, seed: TableModel(target.scores + 0.5 * TableModel.random(4, 8, 1.0, seed).scores),
    "far": lambda target, seed: TableModel.random(4, 8, 1.5, seed),
    "of 2 tokens": lambda target, seed: TableModel.random(4, 8, 1.5, seed, support=2),
}
"""Drafts of a target, made with a seed."""
