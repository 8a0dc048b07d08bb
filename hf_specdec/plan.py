"""`SpeculationPlan`: how one call speculates, every "auto" of its `SpeculativeConfig` resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from .config import SpeculativeConfig
from .models.structure import execution_device
from .trees import AutoTree, DynamicTree, TokenTree, Tree, TreeSchedule
from .trees.candidate_trees import CandidateTrees
from .trees.token_tree import cut


if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from .drafters import Drafter

SAMPLED_CALLS_CHOOSE_ON_GPU = True
"""
Whether "auto" is the default of sampled calls on a GPU, too, unless they are compiled: a fixed tree is faster there
with few rows.
"""


@dataclass(frozen=True)
class SpeculationPlan:
    """A `SpeculativeConfig` with every "auto" resolved for one call."""

    tree: Tree
    draws_children: bool
    """
    Whether the children of a node are drawn from the draft's distribution (else they are its best tokens). Under
    "auto", `AutoTree.takes_either` lets single steps take the best tokens all the same.
    """
    uses_rejection: bool
    """Whether p/q tests decide (else: draw from p, or take the argmax of p, and see whether the token is a child)."""
    disable_by_batch_size: int | None
    draft_temperature: float | None = None
    """Temperature of the draft's distribution q; None: adapted during generation."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    compile: bool = False
    draws_by_position: bool = False
    """
    Whether random numbers belong to positions of the text, so that a seed gives the same sampled text with any trees;
    see `PositionNoise`.
    """

    @property
    def trees(self) -> list[TokenTree | DynamicTree]:
        """
        Trees that the drafter may be asked to fill. "auto" counts as a chain of 1, its smallest tree, and the draft's
        default tree, if that is to choose from, since it chooses only trees that the drafter can fill.
        """
        found: list[TokenTree | DynamicTree] = []
        for tree in self.tree.trees if isinstance(self.tree, TreeSchedule) else [self.tree]:
            if not isinstance(tree, AutoTree):
                found.append(tree)
                continue
            found.append(TokenTree.chain(1))
            found += [] if tree.first is None else [tree.first, *CandidateTrees.dynamic_within(tree)]
        return found

    @classmethod
    def of_call(
        cls,
        generation_config: GenerationConfig,
        config: SpeculativeConfig | None,
        drafter: Drafter,
        target: PreTrainedModel,
    ) -> SpeculationPlan:
        """The plan of a call with this generation config, drafter and target; raises as `resolve`."""
        vocab_size = target.config.get_text_config().vocab_size
        return cls.resolve(
            SpeculativeConfig() if config is None else config,
            default_tree=drafter.default_tree,
            has_probabilities=drafter.has_probabilities,
            do_sample=bool(generation_config.do_sample),
            max_depth=drafter.max_depth,
            prior=drafter.prior,
            on_cpu=runs_on_cpu(target),
            only_chains=only_chains(target, drafter),
            reads_noise=drafter.reads_noise,
            vocab_size=vocab_size if drafter.num_tokens is None else min(vocab_size, drafter.num_tokens),
        )

    @classmethod
    def resolve(
        cls,
        config: SpeculativeConfig,
        *,
        default_tree: Tree,
        has_probabilities: bool,
        do_sample: bool,
        vocab_size: int,
        max_depth: int | None = None,
        prior: Sequence[float] | None = None,
        on_cpu: bool = False,
        only_chains: str | None = None,
        reads_noise: bool = False,
    ) -> SpeculationPlan:
        """
        Resolves every "auto" of a config for one call.

        Args:
            config (`SpeculativeConfig`): what the user asked for.
            default_tree (`Tree`): the drafter's default tree, used if `config` names none.
            has_probabilities (`bool`): whether the drafter knows q.
            do_sample (`bool`): whether the call samples.
            vocab_size (`int`): tokens that the drafter can propose, which bounds the ranks.
            max_depth (`int`, *optional*): most levels that the drafter can propose, which limits the trees of "auto".
            prior (`tuple[float, …]`, *optional*): the drafter's expected acceptance; see `AutoTree`.
            on_cpu (`bool`): whether the target runs on a CPU, where `"auto"` is the default of greedy calls, too.
            only_chains (`str`, *optional*): why target or draft can read no branches; see `only_chains`.
            reads_noise (`bool`): whether the drafter draws children with the noise of their positions.

        Raises:
            ValueError: where the drafter or the tree cannot do what is asked.
        """
        draft_sampling = config.draft_sampling
        if draft_sampling == "auto":
            wants_drawn = has_probabilities and (do_sample or config.verification == "rejection")
            draft_sampling = "sample" if wants_drawn and config.verification != "target" else "greedy"
        draws_children = draft_sampling == "sample"
        if draws_children and not has_probabilities:
            raise ValueError(
                "`draft_sampling='sample'`: this drafter has no probabilities to draw from. Use 'auto' or 'greedy'."
            )
        if config.verification == "rejection" and not draws_children:
            raise ValueError(
                "`verification='rejection'` needs children drawn from the draft's distribution, which this drafter "
                "does not have. Use 'auto' or 'target'."
            )
        # Drawn otherwise, children would hardly ever be what the target draws with the noise of their position.
        may_draw_by_position = (reads_noise or not draws_children) and config.verification != "rejection"
        if only_chains is not None:
            default_tree, vocab_size = _as_chain(default_tree), 1
            _check_is_chain(config.tree, only_chains)
        tree = default_tree if config.tree is None else config.tree
        may_choose = on_cpu or (SAMPLED_CALLS_CHOOSE_ON_GPU and do_sample and not config.compile)
        chooses = may_choose and (may_draw_by_position or not do_sample)
        if config.tree is None and chooses:
            tree = tree if isinstance(tree, TreeSchedule) else AutoTree()
        first = default_tree if isinstance(default_tree, TokenTree | DynamicTree) else None
        takes_either = do_sample and draws_children and config.draft_sampling == config.verification == "auto"
        tree = _fitted(tree, draws_children, vocab_size, max_depth, prior, first, takes_either)
        draws_by_position = do_sample and may_draw_by_position and _chooses(tree)
        uses_rejection = do_sample and draws_children and config.verification != "target" and not draws_by_position
        return cls(
            tree,
            draws_children,
            uses_rejection,
            config.disable_by_batch_size,
            config.draft_temperature,
            config.cuda_graphs,
            config.compile,
            draws_by_position,
        )


def only_chains(target: PreTrainedModel, drafter: Drafter) -> str | None:
    """Why a call must draft chains, in one row: which model can read no branches, and why; None if all can."""
    from .attention import obstacle_to_branches

    for role, model in [("target", target), *(("draft", model) for model in drafter.models)]:
        obstacle = obstacle_to_branches(model)
        if obstacle is not None:
            return f"the {role} {type(model).__name__} {obstacle}"
    return None


def _as_chain(tree: Tree) -> Tree:
    """A drafter's default tree without its branches."""
    return TokenTree.chain(min(tree.depth, 5)) if isinstance(tree, TokenTree | DynamicTree) else tree


def _check_is_chain(tree: Tree | None, obstacle: str) -> None:
    for entry in tree.trees if isinstance(tree, TreeSchedule) else [tree]:
        if isinstance(entry, TokenTree | DynamicTree) and entry.num_nodes > entry.depth:
            raise ValueError(
                f"`tree`={cut(str(entry))}: {obstacle}. Use a chain, such as tree='chain:5', or call `generate` "
                "without `assistant_model`."
            )


def runs_on_cpu(target: PreTrainedModel) -> bool:
    """Whether a target runs on a CPU, where the host runs every step: nothing records graphs there."""
    from .graphs import RECORDERS

    return execution_device(target).type == "cpu" and "cpu" not in RECORDERS


def _chooses(tree: Tree) -> bool:
    """Whether step times have a say in the trees of a call."""
    return any(isinstance(entry, AutoTree) for entry in (tree.trees if isinstance(tree, TreeSchedule) else [tree]))


def _fitted(
    tree: Tree,
    draws_children: bool,
    vocab_size: int,
    max_depth: int | None,
    prior: Sequence[float] | None = None,
    first: TokenTree | DynamicTree | None = None,
    takes_either: bool = False,
) -> Tree:
    """
    The tree, with "auto" limited to what the drafter can fill, and with its default tree `first`; raises `ValueError`
    for any other tree.
    """
    if isinstance(tree, TreeSchedule):
        fitted = partial(_fitted, draws_children=draws_children, vocab_size=vocab_size, max_depth=max_depth)
        return tree.map(lambda entry: fitted(entry, prior=prior, first=first, takes_either=takes_either))
    if isinstance(tree, AutoTree):
        if first is not None:
            _fitted(first, draws_children, vocab_size, max_depth)
        prior = None if prior is None else tuple(prior)
        return replace(tree.within(max_depth, vocab_size), first=first, prior=prior, takes_either=takes_either)
    if isinstance(tree, TokenTree) and draws_children and tree.has_rank_gaps:
        raise ValueError(
            f"`tree`={cut(str(tree))} has rank gaps (a child without its better-ranked sibling). Drawn children fill "
            "the ranks in order: close the gaps, or use draft_sampling='greedy' with verification='target'."
        )
    largest = max(tree.ranks) if isinstance(tree, TokenTree) else tree.top_k - 1
    if largest >= vocab_size:
        raise ValueError(
            f"`tree` asks for rank {largest}, but the vocabulary has only {vocab_size} tokens. Use a narrower one."
        )
    return tree
