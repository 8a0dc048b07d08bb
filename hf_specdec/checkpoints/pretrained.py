"""`from_pretrained` of heads, which reads published checkpoints of many formats into our models."""

from __future__ import annotations

import copy
import difflib
import functools
from os import PathLike
from typing import Any, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .reading import HubOptions


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = "dtype float16, bfloat16, float32 or float64"


class PublishedModel(PreTrainedModel):
    """
    Base class of models that load published checkpoints of several formats. A subclass implements `read_published`,
    and its config class has a method `changed(**fields)`.
    """

    kind = "a model"
    """Name of what a checkpoint must hold, for error messages."""

    config_arguments: tuple[str, ...] = ()
    """The fields of the config that `from_pretrained` takes as arguments."""

    follows_target_dtype = True
    """Whether the model runs in the dtype of its target: unless `from_pretrained` was given a `dtype`."""

    attends_by_itself = False
    """Whether the model attends by code of its own alone, which needs no tree attention."""

    @classmethod
    def read_published(
        cls, name: str, options: HubOptions
    ) -> tuple[PreTrainedConfig, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """
        The config of a published checkpoint, its weights under the names that they have in this class, and the tensors
        that a model of this config does not need, by the same names.

        Raises:
            OSError: if there is no such folder or repository, or it has no config or weights.
            ValueError: if the checkpoint is damaged, or of another kind.
        """
        raise NotImplementedError(f"{cls.__name__} must implement `read_published`.")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        config: PreTrainedConfig | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | PathLike | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        subfolder: str = "",
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> Self:
        """
        Loads a checkpoint from a folder or the Hub, published or written by `save_pretrained`. Pickles are read with
        `weights_only=True`.

        Args:
            pretrained_model_name_or_path (`str`): the folder or Hub repository.
            config (`PreTrainedConfig`, *optional*): config to use in place of the checkpoint's.
            revision (`str`, *optional*), token (`str` or `bool`, *optional*), cache_dir (`str`, *optional*),
                local_files_only (`bool`, *optional*), force_download (`bool`, *optional*), subfolder (`str`,
                *optional*): where the files are, as in transformers' `from_pretrained`.
            dtype (`torch.dtype`, *optional*): dtype of the weights. Without it, or with "auto", the weights keep the
                checkpoint's dtype (the widest, if there are several), and the model runs in the dtype of the target it
                drafts for.
            torch_dtype (`torch.dtype`, *optional*): the former name of `dtype`.
            kwargs: fields of the config that override the checkpoint's (`config_arguments`), such as
                `default_tree=`; all other arguments go to transformers' `from_pretrained`, such as `device_map=`.

        Raises:
            OSError: if there is no such folder or repository, or it has no config or weights.
            ValueError: if the checkpoint is damaged, or of another kind; the message names the key.
            TypeError: for an argument that nobody knows.
        """
        name = str(pretrained_model_name_or_path)
        options = HubOptions(
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else str(cache_dir),
            local_files_only=local_files_only,
            force_download=force_download,
            subfolder=subfolder,
        )
        published, weights, ignored = cls.read_published(name, options)
        changes = {field: kwargs.pop(field) for field in list(kwargs) if field in cls.config_arguments}
        published = published if config is None else config
        config = published.changed(**changes)
        expected = _expected_weights(cls, config, name)
        if changes:
            # A field may say that a tensor of the checkpoint is not used, or is used after all.
            left_out = _expected_weights(cls, published, name).keys() - expected.keys()
            weights = {key: tensor for key, tensor in weights.items() if key not in left_out}
            weights |= {key: ignored[key] for key in expected.keys() & ignored.keys() - weights.keys()}
        check_weights(name, expected, weights, cls.kind)
        dtype = torch_dtype if dtype is None else dtype
        keeps_dtype = dtype in (None, "auto")
        dtype = _widest_dtype(weights) if keeps_dtype else dtype
        try:
            model = super().from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **kwargs)
        except TypeError as error:
            unknown = next((field for field in kwargs if f"unexpected keyword argument '{field}'" in str(error)), None)
            if unknown is None:
                raise
            raise TypeError(cls._about_unknown(unknown)) from None
        model.name_or_path = model.config._name_or_path = name
        model.follows_target_dtype = keeps_dtype
        return model

    @classmethod
    def _about_unknown(cls, argument: str) -> str:
        """The message about an argument that is neither a field of the config nor one of transformers'."""
        near = difflib.get_close_matches(argument, cls.config_arguments, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else f"The fields are {', '.join(sorted(cls.config_arguments))}."
        return (
            f"`{cls.__name__}.from_pretrained({argument}=…)`: no field of its config and no argument of transformers' "
            f"`from_pretrained` has this name. {hint}"
        )


def check_weights(
    name: str, expected: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], kind: str = "a model"
) -> None:
    """
    Checks a checkpoint's weights against the parameters and buffers that its model needs.

    Args:
        name (`str`): name of the checkpoint.
        expected (`dict[str, torch.Tensor]`): the model's parameters and buffers; shapes count, and whether the dtype
            is a floating-point one.
        weights (`dict[str, torch.Tensor]`): the checkpoint's tensors, under the model's names.
        kind (`str`, *optional*): name of what the checkpoint must hold, for the error message.

    Raises:
        ValueError: naming the keys that are missing, unknown, of another shape or dtype, or not finite.
    """
    problems = [f"`{key}` is missing ({_shape(expected[key])})" for key in expected if key not in weights]
    problems += [f"`{key}` is unknown ({_shape(weights[key])})" for key in weights if key not in expected]
    for key in expected.keys() & weights.keys():
        tensor, wanted = weights[key], expected[key]
        if tensor.shape != wanted.shape:
            problems.append(f"`{key}` must be {_shape(wanted)}, but is {_shape(tensor)}")
        elif tensor.is_floating_point() and tensor.dtype not in _DTYPES:
            problems.append(f"`{key}` is quantized ({tensor.dtype}), and must be of {_NAMES}")
        elif tensor.is_floating_point() != wanted.is_floating_point():
            problems.append(f"`{key}` must be of a dtype like {wanted.dtype}, but is {tensor.dtype}")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"`{key}` holds values that are not finite")
    if problems:
        raise ValueError(f"{name} does not hold the weights of {kind}: {'; '.join(sorted(problems))}.")


def _expected_weights(cls: type[PreTrainedModel], config: PreTrainedConfig, name: str) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a model of this config has, on the meta device."""
    try:
        with torch.device("meta"):
            return cls(copy.deepcopy(config)).state_dict()
    except (KeyError, TypeError) as error:  # rotary embeddings raise the bare name of a missing field
        raise ValueError(f"{name}: config.json describes no head that can be built ({error!r}).") from error


def _widest_dtype(weights: dict[str, torch.Tensor]) -> torch.dtype:
    """The dtype that holds all floating-point weights exactly; nearly all checkpoints have only one."""
    dtypes = (tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    return functools.reduce(torch.promote_types, dtypes)


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
