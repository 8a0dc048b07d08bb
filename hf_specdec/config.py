"""`SpeculativeConfig`: how the user wants a call to speculate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .trees import as_tree


_DRAFT_SAMPLING = ("auto", "greedy", "sample")
_VERIFICATION = ("auto", "target", "rejection")
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
            Defaults to "auto" on a CPU, and in sampling calls that are not compiled, with the draft's default tree
            among the trees to choose from; else to this default tree: a chain of 5 for a draft model, a dynamic tree
            of 16 nodes for an n-gram drafter, the head's own for a head.
        draft_sampling (`str`, *optional*, defaults to `"auto"`):
            `"greedy"`: the children of a node are the draft's best tokens. `"sample"`: they are drawn from the draft's
            distribution without replacement. `"auto"`: greedy in greedy calls and for drafters without probabilities,
            else sample; with `tree="auto"` and `verification="auto"`, whichever of both gives more tokens per second
            (in captured steps: sample).
        verification (`str`, *optional*, defaults to `"auto"`):
            `"target"`: draw the next token from the target and look whether it is a child. `"rejection"`: recursive
            rejection sampling, for drawn children. `"auto"`: rejection for drawn children in sampling calls, else
            target; where trees are chosen by "auto", target with children drawn by the same random numbers, so that
            the text depends on the seed alone. Greedy calls always compare children with the target's argmax.
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
            two); other calls run uncompiled, with a warning. Layers alone are compiled, once for all trees and numbers
            of requests, in `generate_batch` and its manager, for schedules, and under "auto" for steps without a tree
            and for trees other than the draft's own.
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, but is {value!r}.")
