"""
Drafting for requests in flight: a drafter's state is kept per request, because rows change between steps.

- `base`: what the engine asks of any draft.
- `cached`: what drafts with a cache have in common.
- `draft_model`, `eagle`, `medusa`: models, which draft for all requests of a step at once; `forwards`: how much they
  read at once, and whether they can be captured.
- `one_by_one`: other drafters, one for each request; `proposals`: checks of what these propose.
- `joining`: drafts of different trees joined to those of a step.
- `temperatures`: draft temperatures, learnt over requests.
"""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel

from ...cache.blocks import BlockPool
from ...drafters import Drafter, DraftModelDrafter, EagleDrafter, MedusaDrafter
from ...graphs import GraphPool
from .base import Drafting
from .draft_model import DraftModelDrafting
from .eagle import EagleDrafting
from .joining import join_drafts
from .medusa import MedusaDrafting
from .one_by_one import OneByOneDrafting
from .temperatures import DraftTemperatures


__all__ = [
    "DraftModelDrafting",
    "DraftTemperatures",
    "Drafting",
    "EagleDrafting",
    "MedusaDrafting",
    "OneByOneDrafting",
    "drafting_of",
    "join_drafts",
]


def drafting_of(
    drafter: Drafter,
    target: PreTrainedModel,
    pool: BlockPool,
    max_requests: int,
    cuda_graphs: bool | Literal["auto"] = False,
    graph_pool: GraphPool | None = None,
) -> Drafting:
    """
    The `Drafting` with which a drafter serves requests in flight.

    Args:
        drafter (`Drafter`): proposes the trees.
        target (`PreTrainedModel`): the target.
        pool (`BlockPool`): the K/V blocks.
        max_requests (`int`): most requests that run at once.
        cuda_graphs (`bool` or `"auto"`): see `SpeculativeConfig`.
        graph_pool (`GraphPool`, *optional*): memory shared with the CUDA graphs of other models.

    Raises:
        ValueError: for a drafter of a user's own that watches the target's forwards.
    """
    if isinstance(drafter, DraftModelDrafter):
        return DraftModelDrafting(drafter.for_call(target), pool, cuda_graphs, graph_pool)
    if isinstance(drafter, EagleDrafter):
        return EagleDrafting(drafter.for_call(target), pool, max_requests, cuda_graphs, graph_pool)
    if isinstance(drafter, MedusaDrafter):
        return MedusaDrafting(drafter.for_call(target))
    if type(drafter).watching is not Drafter.watching:
        raise ValueError(
            f"`assistant_model`: {type(drafter).__name__} watches the target's forwards, whose rows change from step "
            "to step here. Pass it to `generate`."
        )
    return OneByOneDrafting(drafter, target)
