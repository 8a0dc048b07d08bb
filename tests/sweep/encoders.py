"""Prompts of encoder-decoder models: text, sound or an image for the encoder, and the beginning of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from hf_specdec.models.structure import forward_parameters

from .modes import Inputs, prompts
from .shrinking import parts_of


_COLUMNS = 64
"""Of features of sound."""
_SAMPLES = 4000
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")


class NoInputs(ValueError):
    """The sweep does not know what the encoder of this model reads."""


def encoder_inputs(model: PreTrainedModel) -> Callable[[int], Inputs]:
    """
    Makes the inputs of a number of rows, of the first form with which plain `generate` writes.

    Raises:
        NoInputs: if there is none.
    """
    errors = []
    for form in _forms(model):
        try:
            model.generate(
                **form(1), do_sample=False, max_new_tokens=2, return_dict_in_generate=True, output_logits=True
            )
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:100]}")
        else:
            return form
    raise NoInputs(errors[-1])


def _forms(model: PreTrainedModel) -> Iterator[Callable[[int], Inputs]]:
    for kind in (_images, _sounds, _texts):
        for encoded in kind(model):
            yield lambda rows, encoded=encoded: encoded(rows) | _beginning(model, rows)
            yield encoded


def _beginning(model: PreTrainedModel, rows: int) -> Inputs:
    """Tokens of the decoder, in which n-grams find something."""
    if model.config.model_type == "whisper":  # its `generate` takes none beside an assistant
        return {}
    ids = prompts(1)["input_ids"].repeat(rows, 1)
    for row in range(rows):
        ids[row, : 4 + row] += 1
    start = model.generation_config.decoder_start_token_id
    ids[:, 0] = 1 if start is None else start
    return {"decoder_input_ids": ids}


def _texts(model: PreTrainedModel) -> list[Callable[[int], Inputs]]:
    if model.main_input_name != "input_ids":
        return []
    return [_with_boxes if "bbox" in forward_parameters(model) else prompts]


def _with_boxes(rows: int) -> Inputs:
    inputs = prompts(rows)
    return inputs | {"bbox": torch.zeros(*inputs["input_ids"].shape, 4)}


def _sounds(model: PreTrainedModel) -> Iterator[Callable[[int], Inputs]]:
    yield lambda rows: {"input_values": _noise(model, rows, _SAMPLES)}
    parts = list(parts_of(model.config))
    bins = {value: None for name in _BINS for part in parts if isinstance(value := getattr(part, name, None), int)}
    columns = [2 * part.max_source_positions for part in parts if hasattr(part, "max_source_positions")]
    for number in bins:
        for length in (*columns, _COLUMNS):
            for shape in ((number, length), (length, number)):
                yield lambda rows, shape=shape: {"input_features": _noise(model, rows, *shape)}


def _images(model: PreTrainedModel) -> Iterator[Callable[[int], Inputs]]:
    for part in parts_of(model.config):
        size, channels = getattr(part, "image_size", None), getattr(part, "num_channels", 3)
        if isinstance(size, (int, list, tuple)):
            height, width = size if isinstance(size, (list, tuple)) else (size, size)
            yield lambda rows, shape=(channels, height, width): {"pixel_values": _noise(model, rows, *shape)}
            yield (
                lambda rows, shape=(channels, height, width): (
                    prompts(rows) | {"pixel_values": _noise(model, rows, *shape)}
                )
            )
    for part in parts_of(model.config):
        if hasattr(part, "patch_embed_hidden_size"):
            width = 2 + part.patch_embed_hidden_size  # row, column
            yield lambda rows, width=width: {"flattened_patches": _noise(model, rows, 6, width).abs()}


def _noise(model: PreTrainedModel, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(model.dtype)
