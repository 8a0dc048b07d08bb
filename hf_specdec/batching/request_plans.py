"""How requests speculate: the plan of each, from the manager's config and the request's own tree and seed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..config import SpeculativeConfig
from ..drafters import Drafter
from ..generation.refusals import check_call
from ..plan import SpeculationPlan
from .arguments import check_config
from .preparing import Prepared


class RequestPlans:
    """
    Makes the `SpeculationPlan` of requests.

    Args:
        model (`PreTrainedModel`), assistant_model, drafter (`Drafter`), config (`SpeculativeConfig`): see `Admission`.
    """

    def __init__(self, model: PreTrainedModel, assistant_model: Any, drafter: Drafter, config: SpeculativeConfig):
        self._model, self._assistant_model, self._drafter, self._config = model, assistant_model, drafter, config
        self._checked_in: Hashable | None = None
        """The run in which the models were checked last."""

    def own_tree(self, tree: Any, generation_config: GenerationConfig) -> Any:
        """
        The tree that a request asks for, by name or in a config of its own; None for the manager's. What the config
        has from the model's own is not asked for.

        Raises:
            ValueError: for a config with a `speculative_config`.
        """
        inherited, own = self._model.generation_config, generation_config.speculative_config
        if own is not None and own not in (inherited.speculative_config, self._config):
            raise ValueError(
                "`speculative_config` in the `generation_config` of a request: all requests have the manager's. Give "
                "the request a `tree`, or leave it out."
            )
        if tree is None and generation_config.tree != inherited.tree:
            return generation_config.tree
        return tree

    def of(self, prepared: Prepared, tree: Any, seed: int | None, run: Hashable | None) -> SpeculationPlan:
        """
        The plan of a request; shared by those with the same options, unless they have tree or seed. Models are checked
        once in a `run`; see `Admission.request`.

        Raises:
            ValueError, TypeError: for an option that cannot be served.
        """
        found = prepared.found if tree is None and seed is None else None
        if found is not None and found.plan is not None:
            return found.plan
        config = prepared.config
        check_config(self._model, config)
        own = self._own_config(tree, seed if config.do_sample else None)
        config.tree, config.speculative_config = None, own
        call = {"assistant_model": self._assistant_model}
        is_checked = run is not None and run == self._checked_in
        check_call(self._model, config, call, checks_models=not is_checked)
        self._checked_in = run
        plan = SpeculationPlan.of_call(config, own, self._drafter, self._model)
        if found is not None:
            found.plan = plan
        return plan

    def _own_config(self, tree: Any, seed: int | None) -> SpeculativeConfig:
        """The `SpeculativeConfig` of a request with this tree and, if it is sampled, this seed."""
        own = self._config if tree is None else replace(self._config, tree=tree)
        if seed is None:
            return own
        if own.verification == "rejection":
            raise ValueError(
                f"`seed={seed}` with `verification='rejection'`: what is kept would depend on the drafts, and so "
                "on what else runs. Use verification='auto', or leave `seed` out."
            )
        return replace(own, verification="target")
