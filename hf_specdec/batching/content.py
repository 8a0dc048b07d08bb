"""What the images of a prompt hold, and where they stand: prompts that are equal in both may share their K/V."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..engine.prompt_inputs import Content, is_by_token
from .image_parts import has_one_each, parts_of_inputs, runs_of


_KINDS = "image|img|video|audio|speech|sound|visi|visu|frame|document|[be]o[iav]"
_NAMES = re.compile(rf".*({_KINDS}).*token_(id|index|ids)$")
"""Names of fields of a config that tell tokens for which something other than text stands, or that are around it."""
_MARKERS = re.compile(r"(.*_)?([be]o[iav]|start|end|[be]os)_token_")
"""Names of fields among them that tell tokens around it."""


def content_of(model: PreTrainedModel, prompt: list[int], values: dict[str, Any]) -> Content | None:
    """
    What a prompt's inputs beside its tokens (`checked_inputs`) say, and where; None if it is not known where. Those
    with an integer for each token say by it that something stands there: `mm_token_type_ids`, for one.
    """
    by_token = {name: value for name, value in values.items() if is_by_token(value, len(prompt))}
    special = dict[int, bool]()
    for config in _configs(model.config):
        for token, is_marker in _special_tokens(config):
            special[token] = special.get(token, True) and is_marker
    places = {place for place, token in enumerate(prompt) if token in special}
    held = {place for place in places if not special[prompt[place]]}
    for value in by_token.values():
        held.update(value.view(-1).nonzero()[:, 0].tolist())
    if not places | held:
        return None
    runs = runs_of(places | held)
    counts = [sum(place in held for place in range(*run)) for run in runs]
    inputs = {name: one for name, one in values.items() if name not in by_token}
    are_apart = len({prompt[place] for place in held}) == 1 and has_one_each(counts, inputs)
    parts = parts_of_inputs(len(runs), inputs) if are_apart else []
    first, end = runs[0][0], runs[-1][1]
    of_parts = [
        Content(_digest(part | by_token, by_token, own_end), own_first, own_end)
        for (own_first, own_end), part in zip(runs, parts if len(parts) > 1 else (), strict=False)
    ]
    return Content(_digest(values, by_token, end), first, end, tuple(of_parts))


def _digest(values: dict[str, Any], by_token: Iterable[str], end: int) -> bytes:
    """What inputs say; of those with an integer for each token up to `end`."""
    said = sha256()
    for name, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            own = value.reshape(-1)[:end] if name in by_token else value
            said.update(repr((name, own.dtype, tuple(own.shape))).encode())
            said.update(own.contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            said.update(repr((name, value)).encode())
    return said.digest()


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    own = (getattr(config, name, None) for name in config.sub_configs)
    yield from (one for one in own if isinstance(one, PreTrainedConfig))


def _special_tokens(config: PreTrainedConfig) -> Iterator[tuple[int, bool]]:
    """Special tokens, and whether they are only around what is no text."""
    for name, value in vars(config).items():
        if _NAMES.match(name):
            is_marker = _MARKERS.match(name) is not None
            yield from ((token, is_marker) for token in (value if isinstance(value, list | tuple) else [value]))
