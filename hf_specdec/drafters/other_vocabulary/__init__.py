"""
Drafting with a language model of another tokenizer (`assistant_tokenizer=`).

- `pieces`: tokens as bytes.
- `pairs`: what is known of pairs of tokenizers.
- `translation`: what two vocabularies share, and texts of one in the tokens of the other.
- `texts`: texts as the draft model reads them.
- `drafter`: drafting for such texts.
- `drafting`: the same for requests in flight.
- `by_token`: drafts in shared tokens, with their q.
- `by_text`: drafts in texts, encoded with the target's tokenizer.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from ...forwards.vocabulary import is_padded_otherwise
from ..draft_model import DraftModelDrafter
from .by_text import WrittenTextDrafter
from .by_token import SharedTokensDrafter
from .drafter import OtherVocabularyDrafter
from .drafting import OtherVocabularyDrafting
from .pairs import is_one_vocabulary
from .pieces import check_kind
from .translation import Translation


__all__ = [
    "OtherVocabularyDrafter",
    "OtherVocabularyDrafting",
    "SharedTokensDrafter",
    "Translation",
    "WrittenTextDrafter",
    "translating",
]

LEAST_SHARE = 0.5
"""Drafts are made in shared tokens if these are at least such a share of a text; else in texts."""

logger = logging.get_logger(__name__)


def translating(drafter: DraftModelDrafter, target: PreTrainedModel, tokenizer: Any, assistant_tokenizer: Any) -> Any:
    """
    The drafter for a draft model whose tokenizer may be another one than the target's; `drafter` itself if it is not.
    The same arguments give the same drafter, while it is in use.

    Args:
        drafter (`DraftModelDrafter`): the drafter of the model.
        target (`PreTrainedModel`): the target.
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer and the draft's.

    Raises:
        TypeError, ValueError: if a tokenizer is missing or of a kind whose tokens cannot be compared, or if the two
            share nothing.
    """
    model = drafter.model
    if tokenizer is None:
        raise ValueError(
            "`assistant_tokenizer` without `tokenizer`: the tokens of both models are compared. Pass "
            "`tokenizer=` the target's tokenizer, too."
        )
    check_kind(tokenizer, "tokenizer")
    check_kind(assistant_tokenizer, "assistant_tokenizer")
    has_known_size = _size_of(model) == _size_of(target) or is_padded_otherwise(model, target)
    if has_known_size and is_one_vocabulary(tokenizer, assistant_tokenizer):
        return drafter
    translation = Translation.of(target, model, tokenizer, assistant_tokenizer)
    by_token = translation.share_of_text >= LEAST_SHARE
    with _lock:
        key = id(model), id(translation)
        found = _drafters.get(key)
        if found is None or found.model is not model or found.translation is not translation:
            kind = SharedTokensDrafter if by_token else WrittenTextDrafter
            found = _drafters[key] = kind(model, translation)
            found.tokenizers = tokenizer, assistant_tokenizer
            logger.info_once(f"`assistant_tokenizer`: {found.summary}")
        return found


def _size_of(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


_drafters: weakref.WeakValueDictionary[tuple[int, int], OtherVocabularyDrafter] = weakref.WeakValueDictionary()
_lock = threading.Lock()
