"""Drafts that a call names: a Hub id, a folder, or a word such as `ngram` for `assistant_model=`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..checkpoints.kinds import GEMMA_ASSISTANTS
from ..checkpoints.reading import HubOptions, read_config
from ..loading import WORDS, check_place, kind_of_draft, load_draft_to
from ..models.structure import execution_device


_loaded: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Any, Any]]] = WeakKeyDictionary()
"""By target and name, what the draft was loaded from and the draft. They live as long as the target."""
_lock = threading.Lock()


def named_draft(target: PreTrainedModel, name: str | PathLike[str]) -> Any:
    """
    The draft with this name, see `load_draft`, on the target's device; a language model is in the target's dtype. It
    is loaded once for every target, and anew if files of its folder have changed.

    Args:
        target (`PreTrainedModel`): the target.
        name (`str` or path): a Hub id, a folder, `ngram`, or `mtp` for the target's own MTP modules.

    Raises:
        ImportError, OSError: if there is nothing that can be read; the message names the argument.
        ValueError: if a file is damaged, or the draft of a kind that this version does not load.
    """
    name = str(name)
    dtype, device = target.dtype, execution_device(target)
    with _lock:
        drafts = _loaded.setdefault(target, {})
        source = (_files_of(name), None if name in WORDS else dtype, device)
        if name not in drafts or drafts[name][0] != source:
            drafts.pop(name, None)  # freed before the new one takes memory
            with _naming_the_argument(name):
                drafts[name] = source, load_draft_to(name, dtype, str(device), target)
        return drafts[name][1]


def names_own_draft(target: PreTrainedModel, name: str | PathLike[str]) -> bool:
    """
    Whether a pipeline's `assistant_model=` names a head or drafter of this library; else a model, which transformers
    itself loads for pipelines.

    Raises:
        OSError, ValueError: as in `named_draft`.
    """
    name = str(name)
    if name in WORDS:
        return True
    with _naming_the_argument(name):
        check_place(name)
        config = read_config(name, HubOptions().find(name, "config.json"))
        kind = config.get("model_type")
        is_unknown = str(kind).endswith("_assistant") and kind not in GEMMA_ASSISTANTS
        if target.config.is_encoder_decoder or is_unknown:
            return False
        return kind_of_draft(name) != "model"


@contextmanager
def _naming_the_argument(name: str) -> Iterator[None]:
    """Lets errors that say what is wrong with a draft say first which argument named it."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        kind = next(kind for kind in (ImportError, OSError, ValueError) if isinstance(error, kind))
        raise kind(f"`assistant_model`={name!r}: {error}") from error


def _files_of(name: str) -> tuple[Any, ...]:
    """What changes when a folder does: paths, sizes and times of its files; nothing for a Hub id."""
    folder = Path(name)
    if not folder.is_dir():
        return ()
    stats = ((path, path.stat()) for path in sorted(folder.resolve().iterdir()) if path.is_file())
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)
