"""How a call speculates: the user's `SpeculativeConfig`, and what "auto" resolves to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from .models.structure import execution_device
from .trees import AutoTree, DynamicTree, TokenTree, Tree, TreeSchedule, as_tree
from .trees.token_tree import cut
from .trees.tree_menu import TreeMenu


if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from .drafters import Drafter

_DRAFT_SAMPLING = ("auto", "greedy", "sample")
_VERIFICATION = ("auto", "target", "rejection")
SAMPLED_CALLS_CHOOSE_ON_GPU = False
"""
Whether "auto" is the default of sampled calls on a GPU, too, unless they are compiled: a fixed tree, compiled as a
whole, is faster with few rows. Off until `benchmarks/auto_speed.py` has shown it on a GPU; a seed then gives one text
only as long as the same trees are chosen.
"""
_ON_FOREIGN_HOOKS = ("warn", "refuse")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """
    Settings of speculation in a `generate` call. `generate(tree=…)` is short for
    `generate(speculative_config=SpeculativeConfig(tree=…))`.

    Args:
        tree (`str`, list of paths, `TokenTree`, `DynamicTree`, `"auto"` or list of pairs, *optional*):
            The tree to fill at every step; as text, rank paths, `"chain:5"`, `"branching:4,2,1"` or
            `"dynamic:5,4,16"`. `"auto"`: chosen during generation from measured acceptance and step times.
            A list of pairs (sequence length in tokens, prompt included; tree or None) sets the tree, or none, from
            each length on; the first length is 0.
            Defaults to "auto" on a CPU, where the draft's default tree is among the trees to choose from; elsewhere to
            this default tree: a chain of 5 for a draft model, a dynamic tree of 16 nodes for an n-gram drafter, the
            head's own for a head.
        draft_sampling (`str`, *optional*, defaults to `"auto"`):
            `"greedy"`: the children of a node are the draft's best tokens. `"sample"`: they are drawn from the draft's
            distribution without replacement. `"auto"`: greedy in greedy calls and for drafters without probabilities,
            else sample; with `tree="auto"` and `verification="auto"`, whichever of both gives more tokens per second
            (in captured steps: sample).
        verification (`str`, *optional*, defaults to `"auto"`):
            `"target"`: draw the next token from the target and look whether it is a child. `"rejection"`: recursive
            rejection sampling, for drawn children. `"auto"`: rejection for drawn children in sampling calls, else
            target. Greedy calls always compare children with the target's argmax.
        draft_temperature (`float`, *optional*):
            Temperature of the draft's distribution, on top of the call's own warpers. By default it adapts during
            generation so that drawn tokens are accepted as often as possible; the output is exact at any temperature.
        disable_by_batch_size (`int`, *optional*):
            With more than this many unfinished rows, steps carry no draft tokens.
        disable_counts_waiting (`bool`, *optional*, defaults to `False`):
            Whether waiting requests count for `disable_by_batch_size`, too. Only for `generate_batch` and its manager:
            `generate` has no waiting requests.
        max_step_nodes (`int`, *optional*):
            Most draft tokens per step, summed over all rows: every row's tree is cut to an equal share. Only for
            `generate_batch` and its manager.
        cuda_graphs (`bool` or `"auto"`, *optional*, defaults to `"auto"`):
            Whether forwards over trees are replayed from captured CUDA graphs, and attend with the Triton kernel.
            `"auto"`: where that is possible: on one CUDA device, without forward hooks of the user, and outside of
            autocast. `True` refuses other models.
        compile (`bool`, *optional*, defaults to `False`):
            Whether the forwards of steps that run entirely on the device (on CUDA: greedy calls, or sampling with at
            most temperature, top-k and top-p) are compiled before they are captured. In `generate`, compiling takes up
            to a minute or two per model, batch size and tree, and again for a longer text than before (in powers of
            two); other calls run uncompiled, with a warning. Where trees change from step to step ("auto",
            schedules), and in `generate_batch` and its manager, layers are compiled once, for all numbers of requests
            and all trees.
        on_foreign_hooks (`str`, *optional*, defaults to `"warn"`):
            What to do if target or draft have forward hooks of the user's (not those of libraries that place or shard
            models), whose effect may depend on the number of tokens in a forward. `"warn"`: warn once and name them.
            `"refuse"`: raise a `ValueError`.

    Raises:
        ValueError: for a value that is not listed here, for `"greedy"` with `"rejection"`, and for an invalid tree.
        TypeError: if `tree` is of another type.
    """

    tree: Any = None
    draft_sampling: Literal["auto", "greedy", "sample"] = "auto"
    verification: Literal["auto", "target", "rejection"] = "auto"
    draft_temperature: float | None = None
    disable_by_batch_size: int | None = None
    disable_counts_waiting: bool = False
    max_step_nodes: int | None = None
    cuda_graphs: bool | Literal["auto"] = "auto"
    compile: bool = False
    on_foreign_hooks: Literal["warn", "refuse"] = "warn"

    def __post_init__(self) -> None:
        if self.tree is not None:
            object.__setattr__(self, "tree", as_tree(self.tree))
        _check_choice("draft_sampling", self.draft_sampling, _DRAFT_SAMPLING)
        _check_choice("verification", self.verification, _VERIFICATION)
        if self.draft_sampling == "greedy" and self.verification == "rejection":
            raise ValueError(
                "`draft_sampling='greedy'` with `verification='rejection'` would bias the output: p/q tests are for "
                "children drawn from q. Use verification='target', or draft_sampling='sample'."
            )
        temperature = self.draft_temperature
        if temperature is not None and not (_is_number(temperature) and 0 < temperature < math.inf):
            raise ValueError(f"`draft_temperature` must be None or a positive number, but is {temperature!r}.")
        limit = self.disable_by_batch_size
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ValueError(f"`disable_by_batch_size` must be None or an integer from 0 on, but is {limit!r}.")
        if not isinstance(self.disable_counts_waiting, bool):
            raise ValueError(
                f"`disable_counts_waiting` must be True or False, but is {self.disable_counts_waiting!r}."
            )
        most = self.max_step_nodes
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"`max_step_nodes` must be None or an integer from 1 on, but is {most!r}.")
        if not (self.cuda_graphs == "auto" or isinstance(self.cuda_graphs, bool)):
            raise ValueError(f"`cuda_graphs` must be 'auto', True or False, but is {self.cuda_graphs!r}.")
        if not isinstance(self.compile, bool):
            raise ValueError(f"`compile` must be True or False, but is {self.compile!r}.")
        if self.compile and self.cuda_graphs is False:
            raise ValueError("`compile=True` is for steps in CUDA graphs. Leave out `cuda_graphs=False`.")
        _check_choice("on_foreign_hooks", self.on_foreign_hooks, _ON_FOREIGN_HOOKS)

    @classmethod
    def from_generation_config(cls, generation_config: Any) -> SpeculativeConfig | None:
        """
        The `SpeculativeConfig` of a call, from its `tree` or `speculative_config`; None if neither is set.

        Raises:
            ValueError: if both are set, or one is invalid.
            TypeError: if `speculative_config` is of another type.
        """
        tree, config = generation_config.tree, generation_config.speculative_config
        if config is None:
            return None if tree is None else cls._of_call(tree=tree)
        if tree is not None:
            raise ValueError(
                f"`tree`={tree!r} beside `speculative_config`: give one of them (`SpeculativeConfig(tree=…)`)."
            )
        if isinstance(config, cls):
            return config
        if isinstance(config, Mapping):
            unknown = set(config) - set(cls.__dataclass_fields__)
            if unknown:
                raise ValueError(
                    f"`speculative_config` has the unknown keys {sorted(unknown)}. Those there are: "
                    f"{', '.join(cls.__dataclass_fields__)}."
                )
            return cls._of_call(**config)
        raise TypeError(
            f"`speculative_config` must be a `SpeculativeConfig`, but is {type(config).__name__}: {config!r}."
        )

    @classmethod
    def _of_call(cls, **values: Any) -> SpeculativeConfig:
        """The config; an error ends here, since the frames that read a tree would hide the user's call."""
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise error.with_traceback(None) from None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable dict, which `speculative_config=` accepts."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"tree": None if self.tree is None else self.tree.to_dict()}


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
            found += [] if tree.first is None else [tree.first, *TreeMenu.dynamic_within(tree)]
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
            on_cpu (`bool`): whether the target runs on a CPU, where `"auto"` is the default and random numbers belong
                to positions under it.
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
        may_draw_by_position = on_cpu and (reads_noise or not draws_children) and config.verification != "rejection"
        if only_chains is not None:
            default_tree, vocab_size = _as_chain(default_tree), 1
            _check_is_chain(config.tree, only_chains)
        tree = default_tree if config.tree is None else config.tree
        chooses_on_gpu = SAMPLED_CALLS_CHOOSE_ON_GPU and do_sample and not config.compile
        chooses = (may_draw_by_position or not do_sample) if on_cpu else chooses_on_gpu
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, but is {value!r}.")
