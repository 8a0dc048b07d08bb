"""Drafters: objects that propose the draft tokens of every step."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal

from transformers import PreTrainedModel
from transformers.utils import logging

from ..block import BlockHead
from ..cache.blocks import BlockPool
from ..checkpoints.kinds import GEMMA_ASSISTANTS
from ..eagle import EagleHead
from ..forwards.vocabulary import is_padded_otherwise
from ..gemma import GemmaAssistant
from ..graphs import GraphPool
from ..medusa import MedusaHeads
from ..mtp import MtpHead
from .base import Drafter
from .block import BlockDrafter
from .draft_model import DraftModelDrafter, DraftModelDrafting
from .drafting import Drafting
from .eagle import EagleDrafter
from .features import FeatureDrafter, FeatureDrafting
from .gemma import GemmaDrafter, GemmaDrafting
from .last_feature import LastFeatureDrafter, LastFeatureDrafting
from .medusa import MedusaDrafter
from .mtp import MtpDrafter
from .ngram import NgramDraft
from .observed import ObservedDrafter
from .one_by_one import OneByOneDrafting
from .other_vocabulary import OtherVocabularyDrafter, OtherVocabularyDrafting, translating
from .request import DraftRequest
from .several_mtp import SeveralMtpDrafter, SeveralMtpDrafting, mtp_drafter


__all__ = [
    "BlockDrafter",
    "DraftModelDrafter",
    "DraftRequest",
    "Drafter",
    "Drafting",
    "EagleDrafter",
    "FeatureDrafter",
    "GemmaDrafter",
    "MedusaDrafter",
    "MtpDrafter",
    "NgramDraft",
    "ObservedDrafter",
    "OtherVocabularyDrafter",
    "as_drafter",
    "drafting_of",
    "is_own_draft",
    "reading",
]

logger = logging.get_logger(__name__)


def is_own_draft(assistant: Any) -> bool:
    """Whether `assistant` is a drafter or head of this library, which transformers itself does not know."""
    return isinstance(_unwrapped(assistant), Drafter | BlockHead | EagleHead | GemmaAssistant | MedusaHeads | MtpHead)


def as_drafter(assistant: Any) -> Drafter:
    """
    The drafter for the value of `assistant_model=`.

    Raises:
        TypeError: if the value is neither a drafter nor a head nor a language model.
        ValueError: for a model tuned with a learned prompt (PEFT).
    """
    if isinstance(assistant, Drafter):
        return assistant
    peft_config = getattr(assistant, "active_peft_config", None)
    if peft_config is not None and peft_config.is_prompt_learning:
        raise ValueError(
            f"`assistant_model`: the draft is tuned with {peft_config.peft_type} (a learned prompt), which cannot "
            "fill a tree. Use a LoRA-like adapter, or the model without its prompt."
        )
    model = _unwrapped(assistant)
    kinds: dict[type, Any] = {
        BlockHead: BlockDrafter,
        EagleHead: EagleDrafter,
        GemmaAssistant: GemmaDrafter,
        MedusaHeads: MedusaDrafter,
        MtpHead: mtp_drafter,
    }
    drafter = next((kinds[kind] for kind in kinds if isinstance(model, kind)), None)
    if drafter is not None:
        if hasattr(assistant, "_orig_mod"):
            logger.warning_once("`assistant_model`: the compiled head runs as it was before `torch.compile`.")
        return drafter(model)
    if isinstance(model, PreTrainedModel) and model.config.model_type in GEMMA_ASSISTANTS:
        return GemmaDrafter(GemmaAssistant.of(model))  # loaded by transformers
    if peft_config is not None:
        assistant = model  # the base model holds the adapter's layers
    if isinstance(assistant, PreTrainedModel) or isinstance(getattr(assistant, "base_model", None), PreTrainedModel):
        return DraftModelDrafter(assistant)
    raise TypeError(
        "`assistant_model` must be a causal language model, an `EagleHead`, `BlockHead`, `MedusaHeads`, `MtpHead`, "
        f"`GemmaAssistant`, or a drafter such as `NgramDraft()`, but is {type(assistant).__name__}: {assistant!r}."
        f"{_remedy(assistant)}"
    )


def reading(assistant: Any, target: PreTrainedModel, tokenizer: Any = None, assistant_tokenizer: Any = None) -> Any:
    """
    The value of `assistant_model=` with the tokenizers beside it: a drafter that translates between them, if
    `assistant_tokenizer` is another vocabulary than the target's; else the value itself.

    Raises:
        TypeError, ValueError: for a draft that has no tokenizer of its own, and as `translating`.
    """
    if None in (assistant, assistant_tokenizer) or isinstance(assistant, OtherVocabularyDrafter):
        return assistant
    drafter = as_drafter(assistant)
    if not isinstance(drafter, DraftModelDrafter):
        raise ValueError(
            f"`assistant_tokenizer` with {type(drafter).__name__}: it drafts in the target's tokens. Leave "
            "`assistant_tokenizer` out."
        )
    if tokenizer is None and is_padded_otherwise(drafter.model, target):
        return assistant
    found = translating(drafter, target, tokenizer, assistant_tokenizer)
    return assistant if found is drafter else found


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
    if isinstance(drafter, OtherVocabularyDrafter):
        return OtherVocabularyDrafting(drafter.for_call(target), pool, max_requests, cuda_graphs, graph_pool)
    if isinstance(drafter, DraftModelDrafter):
        return DraftModelDrafting(drafter.for_call(target), pool, max_requests, cuda_graphs, graph_pool)
    if isinstance(drafter, SeveralMtpDrafter):
        return SeveralMtpDrafting(drafter.for_call(target), pool, max_requests, cuda_graphs, graph_pool)
    if isinstance(drafter, FeatureDrafter):
        return FeatureDrafting(drafter.for_call(target), pool, max_requests, cuda_graphs, graph_pool)
    if isinstance(drafter, GemmaDrafter):
        return GemmaDrafting(drafter.for_call(target), pool, max_requests)
    if isinstance(drafter, LastFeatureDrafter):
        return LastFeatureDrafting(drafter.for_call(target), pool, max_requests)
    if type(drafter).watching is not Drafter.watching:
        raise ValueError(
            f"`assistant_model`: {type(drafter).__name__} watches the target's forwards, whose rows change from step "
            "to step here. Pass it to `generate`."
        )
    return OneByOneDrafting(drafter, target)


def _remedy(assistant: Any) -> str:
    """What to write instead of a name or a class."""
    if isinstance(assistant, type):
        return f" Pass an instance of it{f', `{assistant.__name__}()`' if issubclass(assistant, NgramDraft) else ''}."
    if isinstance(assistant, str | PathLike):
        return f" Load it first: `hf_specdec.load_draft({str(assistant)!r})`."
    return ""


def _unwrapped(assistant: Any) -> Any:
    """The model inside a `torch.compile` or PEFT wrapper; any other object is returned as it is."""
    model = getattr(assistant, "_orig_mod", assistant)
    return model if getattr(model, "active_peft_config", None) is None else model.get_base_model()
