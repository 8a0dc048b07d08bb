"""`diagnose`: agreement of a head with its target's own text, under every reading of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoints.reading import Checkpoint, HubOptions
from ..drafters import EagleDrafter
from ..eagle import EagleHead
from ..eagle.formats import read_head
from ..models.structure import execution_device
from ..trees import TokenTree
from .diagnosis import Agreement, Diagnosis
from .measuring import ReadText, Text, hits_on, tree_acceptance_length, write
from .readings import readings, reread


logger = logging.get_logger(__name__)

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
    depth: int = 5,
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
        depth (`int`, *optional*, defaults to 5): number of depths to examine.
        report (callable, *optional*): receives a line for every answer and every reading, as soon as it is there.
            Defaults to the log.
        changes: fields of `EagleConfig` that override the checkpoint's, as in `EagleHead.from_pretrained`.

    Raises:
        OSError: if the checkpoint does not exist, as in `EagleHead.from_pretrained`.
        ValueError: if the checkpoint cannot be read, there are no prompts, or no answer is longer than `depth`.
    """
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"`prompts` must hold texts for the target to answer, but is {prompts!r}. Give at least one.")
    options = options or HubOptions()
    # The head is loaded in the target's dtype: a later conversion would round the rotary embedding's frequencies.
    model = EagleHead.from_pretrained(head, **options.as_arguments(), dtype=target.dtype, **changes)
    diagnosis = Diagnosis(
        head=head,
        target=target.name_or_path,
        format=model.config.source_format or "hf_specdec",
        config=model.config,
        conventions=dict(model.config.conventions or {}),
        keys=_keys(head, options),
    )
    drafter = EagleDrafter(model)
    try:
        drafter.check(target, TokenTree.chain(1))
    except ValueError as error:
        diagnosis.problem = str(error)
        return diagnosis
    model = model.to(execution_device(target)).eval()
    texts = []
    for number, prompt in enumerate(prompts, 1):
        report(f"The target answers prompt {number} of {len(prompts)}.")
        texts.append(write(target, tokenizer, prompt, max_new_tokens))
    diagnosis.num_tokens = sum(text.num_new_tokens for text in texts)
    diagnosis.agreements = _agreements(model, target, texts, depth, report)
    best = reread(model, diagnosis.best.changes)
    report("The target answers again, with the head's default tree.")
    diagnosis.tree_acceptance_length = tree_acceptance_length(best, target, texts)
    return diagnosis


def _keys(head: str, options: HubOptions) -> dict[str, list[str]]:
    reading = read_head(Checkpoint.read(head, options))
    return {"used": sorted(reading.weights), "ignored": sorted(reading.ignored)}


def _agreements(
    head: EagleHead, target: PreTrainedModel, texts: list[Text], depth: int, report: Callable[[str], None]
) -> list[Agreement]:
    """The agreement of each reading, the head as read first."""
    tried = readings(head.config, target.config)
    heads = [reread(head, changes) for _, changes in tried]
    read = [ReadText.of(text, heads, target) for text in texts if text.num_new_tokens > depth]
    if not read:
        raise ValueError(f"`max_new_tokens`: the answers are too short to look at {depth} depths. Ask for more.")
    num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
    agreements = []
    for (name, changes), variant in zip(tried, heads, strict=True):
        hits = torch.cat([hits_on(text, variant, target, depth) for text in read])
        boundaries = variant.config.aux_boundaries(num_layers)
        agreements.append(Agreement.from_hits(hits, name=name, changes=changes, boundaries=boundaries))
        length = agreements[-1].acceptance_length
        report(f"Reading {len(agreements)} of {len(tried)}, {name}: {length:.2f} tokens a step.")
    return agreements
