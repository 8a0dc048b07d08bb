"""`diagnose`: agreement of a head with its target's own text, under every reading of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..block import BlockHead
from ..block.formats import read_block_files
from ..checkpoints.reading import Checkpoint, HubOptions
from ..drafters import as_drafter
from ..eagle import EagleHead
from ..eagle.formats import read_head
from ..gemma import GemmaAssistant
from ..loading import kind_of_draft
from ..models.structure import execution_device
from ..trees import TokenTree
from .along_text import Head
from .diagnosis import WEAK, Agreement, Diagnosis, better_of
from .mask_tokens import likely_mask_token
from .measuring import ReadText, Text, chains_on, tree_acceptance_length, write
from .readings import Reading, readings, reread


logger = logging.get_logger(__name__)

MOST_CHANGES = 3
"""Most mistakes that are found together."""

PROMPTS = (
    "Explain to a child why the sky is blue during the day and red in the evening.",
    "Write a Python function that returns the longest word of a sentence, with a docstring and two examples.",
    "My flight leaves at 6:40 and the train to the airport takes 50 minutes. When should I get up?",
    "List the steps to repot a house plant.",
    "What is the difference between a virus and a bacterium?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Summarize the rules of chess for somebody who has never played.",
    "def quicksort(values):",
)
"""Default prompts for the target: chat and code."""


@torch.no_grad()
def diagnose(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: str,
    *,
    options: HubOptions | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 96,
    depth: int | None = None,
    report: Callable[[str], None] = logger.info,
    **changes: Any,
) -> Diagnosis:
    """
    Examines a head on text that the target writes.

    Args:
        target (`PreTrainedModel`): the target of the head; it may be placed on several devices or offloaded
            (`device_map=`).
        tokenizer (`PreTrainedTokenizerBase`): the target's tokenizer.
        head (`str`): folder or Hub repository of the head.
        options (`HubOptions`, *optional*): revision, token and other options of the Hub for the head.
        prompts (`Sequence[str]`, *optional*): prompts that the target answers greedily, with the tokenizer's chat
            template if it has one.
        max_new_tokens (`int`, *optional*, defaults to 96): most tokens of each answer.
        depth (`int`, *optional*): number of depths to examine, at most as many as a block head drafts. Defaults to 5,
            or 8 for block heads.
        report (callable, *optional*): receives a line for every answer and every reading, as soon as it is there.
            Defaults to the log.
        changes: fields of the head's config that override the checkpoint's, as in its `from_pretrained`.

    Raises:
        OSError: if the checkpoint does not exist, as in `from_pretrained`.
        ValueError: if the checkpoint cannot be read, there are no prompts, or no answer is longer than `depth`.
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"`prompts` must hold texts for the target to answer, but is {prompts!r}. Give at least one.")
    options = options or HubOptions()
    # The head is loaded in the target's dtype: a later conversion would round the rotary embedding's frequencies.
    kind = kind_of_draft(head, **options.as_arguments())
    kinds: dict[str, Any] = {"block": BlockHead, "gemma": GemmaAssistant}
    head_class = kinds.get(kind, EagleHead)
    model = head_class.from_pretrained(head, **options.as_arguments(), dtype=target.dtype, **changes)
    diagnosis = Diagnosis(
        head=head,
        target=target.name_or_path,
        format=getattr(model.config, "source_format", None) or "hf_specdec",
        config=model.config,
        conventions=dict(getattr(model.config, "conventions", None) or {}),
        keys=_keys(head, options, kind),
    )
    try:
        as_drafter(model).check(target, TokenTree.chain(1))
    except ValueError as error:
        diagnosis.problem = str(error)
        return diagnosis
    model = model.to(execution_device(target)).eval()
    texts = []
    for number, prompt in enumerate(prompts, 1):
        report(f"The target answers prompt {number} of {len(prompts)}.")
        texts.append(write(target, tokenizer, prompt, max_new_tokens))
    diagnosis.num_tokens = sum(text.num_new_tokens for text in texts)
    diagnosis.agreements = agreements_on(model, target, texts, depth, report)
    best = reread(model, diagnosis.best.changes)
    report("The target answers again, with the head's default tree.")
    diagnosis.tree_acceptance_length = tree_acceptance_length(best, target, texts)
    return diagnosis


def _keys(head: str, options: HubOptions, kind: str) -> dict[str, list[str]]:
    if kind == "gemma":
        used = GemmaAssistant.read_published(head, options)[1].keys()
        return {"used": sorted(used), "ignored": sorted(Checkpoint.read(head, options).weights.keys() - used)}
    reading = read_block_files(head, options) if kind == "block" else read_head(Checkpoint.read(head, options))
    return {"used": sorted(reading.weights), "ignored": sorted(reading.ignored)}


def agreements_on(
    head: Head,
    target: PreTrainedModel,
    texts: list[Text],
    depth: int | None,
    report: Callable[[str], None],
    most_changes: int = MOST_CHANGES,
) -> list[Agreement]:
    """
    The agreement of each reading, the head as read first. One mistake may hide another: where the head is misread, or
    drafts badly, further changes are tried on top of the best reading so far, up to `most_changes` together.
    """
    tried = readings(head.config, target.config)
    heads = [reread(head, changes) for _, changes in tried]
    is_block = isinstance(head, BlockHead)
    if isinstance(head, BlockHead):
        depth = min(8 if depth is None else depth, *(variant.num_drafts for variant in heads))
    depth = 5 if depth is None else depth
    read = [ReadText.of(text, heads, target) for text in texts if text.num_new_tokens > depth]
    if not read:
        raise ValueError(f"`max_new_tokens`: the answers are too short to look at {depth} depths. Ask for more.")
    examine = partial(_agreement, head, target, read, depth)
    agreements: list[Agreement] = []
    start: Agreement | None = None
    for num_changes in range(1, most_changes + 1):
        if start is not None:
            tried = _further(head, start, target)
        based = head if start is None else reread(head, start.changes)
        tried += _masks(based, target, read[0], depth, start, report)
        for name, changes in tried:
            number = num_changes if changes else 0
            agreements.append(examine(name=name, changes=changes, num_changes=number))
            report(f"Reading {len(agreements)}, {name}: {agreements[-1].acceptance_length:.2f} tokens a step.")
        best = agreements[0] if start is None else start
        better = better_of(best, [one for one in agreements if one.num_changes == num_changes], is_block)
        if better is not best:
            start = better
        elif start is None and best.acceptance_length < WEAK:  # what one change does may show with another alone
            start = max(agreements[1:], key=lambda agreement: agreement.log_prob, default=None)
        else:
            break
        if start is None:
            break
    return agreements


def _agreement(
    head: Head, target: PreTrainedModel, read: list[ReadText], depth: int, changes: dict[str, Any], **fields: Any
) -> Agreement:
    """The agreement of a head under one reading along texts."""
    variant = reread(head, changes)
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    boundaries = variant.config.aux_boundaries(num_layers)
    chains = [chains_on(text, variant, target, depth) for text in read]
    return Agreement.of(chains, changes=changes, boundaries=boundaries, **fields)


def _further(head: Head, start: Agreement, target: PreTrainedModel) -> list[Reading]:
    """Readings with one more change than those of `start`."""
    config = head.config.changed(**start.changes)
    return [
        (f"{start.name} and {name}", start.changes | changes)
        for name, changes in readings(config, target.config)
        if changes and not changes.keys() & start.changes.keys()
    ]


def _masks(
    head: Head,
    target: PreTrainedModel,
    read: ReadText,
    depth: int,
    start: Agreement | None,
    report: Callable[[str], None],
) -> list[Reading]:
    """Another mask token of a block head, if the head, read as in `start`, answers better to one."""
    known = {} if start is None else start.changes
    if not isinstance(head, BlockHead) or head.config.has_mask_embedding or "mask_token_id" in known:
        return []
    report("The head tells which token it takes for a mask.")
    token = likely_mask_token(head, target, read, depth)
    if token == head.config.mask_token:
        return []
    name = f"mask token {token}" if start is None else f"{start.name} and mask token {token}"
    return [(name, known | {"mask_token_id": token})]
