"""Loading of targets and drafts by name: a Hub id or a folder."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from .adapters import LoadedAdapters
from .block import BlockHead
from .checkpoints.kinds import GEMMA_ASSISTANTS, kind_of_checkpoint
from .checkpoints.reading import WEIGHT_FILES, HubOptions, find_first, read_config, tensor_names
from .drafters import NgramDraft, reading
from .eagle import EagleHead
from .gemma import GemmaAssistant
from .medusa import MedusaHeads
from .mtp import MtpHead
from .smollm2 import smollm2_folder


SMOLLM2 = "SmolLM2-135M-Instruct"
"""Name of the default target."""

_LOADERS: dict[str, Any] = {
    "eagle": EagleHead,
    "block": BlockHead,
    "gemma": GemmaAssistant,
    "medusa": MedusaHeads,
    "model": AutoModelForCausalLM,
}

WORDS = ("ngram", "mtp")
"""Names of drafts that have no files of their own."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_device() -> str:
    """The device `cuda` where PyTorch finds one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_target(
    name: str | None, dtype: torch.dtype, device: str, device_map: str | None = None, with_images: bool = False
) -> PreTrainedModel:
    """
    Loads a language model in evaluation mode; SmolLM2-135M-Instruct if `name` is None.

    Args:
        name (`str`, *optional*): Hub id or folder.
        dtype (`torch.dtype`): dtype of the weights.
        device (`str`): device of the model, unless `device_map` is given.
        device_map (`str`, *optional*): placement over several devices, as in transformers.
        with_images (`bool`, *optional*, defaults to `False`): whether a checkpoint of an image-text model is loaded
            with what reads images (`takes_images`).

    Raises:
        ImportError, OSError, ValueError: if no model can be read.
    """
    check_place(name)
    kind = AutoModelForImageTextToText if with_images and takes_images(name) else AutoModelForCausalLM
    model = kind.from_pretrained(name or str(smollm2_folder()), dtype=dtype, device_map=device_map)
    return (model if device_map is not None else model.to(device)).eval()


def load_adapters(model: PreTrainedModel, places: dict[str, str]) -> None:
    """
    Loads LoRA adapters into a model, and leaves them inactive.

    Args:
        model (`PreTrainedModel`): the model.
        places (`dict[str, str]`): Hub id or folder of each adapter, by name.

    Raises:
        ImportError: without PEFT.
        OSError, ValueError: if an adapter cannot be read, or requests cannot choose it.
    """
    if not places:
        return
    from peft import PeftModel

    tuned: Any = None
    for name, place in places.items():
        check_place(place)
        how: dict[str, Any] = {"adapter_name": name, "autocast_adapter_dtype": False}  # in the dtype of the model
        if tuned is None:
            tuned = PeftModel.from_pretrained(model, place, **how)
        else:
            tuned.load_adapter(place, **how)
    loaded = LoadedAdapters.of(model)
    errors = [error for name in places if (error := loaded.error_of(name)) is not None]
    if errors:
        raise ValueError(errors[0])
    for layer in loaded.layers:
        layer.enable_adapters(False)


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """
    The tokenizer of a target.

    Raises:
        OSError, ValueError: if there is nothing that can be read.
    """
    check_place(name)
    return AutoTokenizer.from_pretrained(name or str(smollm2_folder()))


def takes_images(name: str | None) -> bool:
    """Whether a checkpoint is, by its config, that of an image-text model."""
    if name is None:
        return False
    config = AutoConfig.from_pretrained(name)
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type, ())
    known = (known,) if isinstance(known, str) else tuple(known)
    return not set(known).isdisjoint(config.architectures or ())


def load_processor(name: str | None) -> Any:
    """
    The processor of an image-text model, which makes its inputs of texts and images; None for other models.

    Raises:
        ImportError, OSError, ValueError: if it cannot be read, or is none of images.
    """
    if not takes_images(name):
        return None
    processor = AutoProcessor.from_pretrained(name)
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{name}: the processor {type(processor).__name__} reads no images.")
    return processor


def load_draft(name: str, *, target: PreTrainedModel | None = None, **kwargs: Any) -> Any:
    """
    Loads a value of `assistant_model=`, of whatever kind the files say: an EAGLE head, a block head (DFlash, JetSpec,
    DSpark, DFlash 2, P-EAGLE), Medusa heads, an assistant of Gemma 4, or a language model; for `ngram` an
    `NgramDraft`, for `mtp` the MTP modules of a target.

    Args:
        name (`str`): Hub id or folder, `ngram` or `mtp`.
        target (`PreTrainedModel`, *optional*): the target, for `mtp`; other drafts need none.
        kwargs: arguments of the kind's `from_pretrained`, such as `dtype=`, `device_map=`, `revision=` or, for heads,
            fields of their config; of `NgramDraft` for `ngram`; of `MtpHead.from_target` for `mtp`.

    Raises:
        ImportError, OSError: if there is nothing that can be read.
        ValueError: if a file is damaged, or the draft of a kind that this version does not load.
    """
    if name == "ngram":
        return NgramDraft(**kwargs)
    if name == "mtp":
        if target is None:
            raise ValueError("'mtp': MTP modules are part of a target. Pass it: `load_draft('mtp', target=model)`.")
        return MtpHead.from_target(target, **kwargs)
    check_place(name)
    return _LOADERS[kind_of_draft(name, **kwargs)].from_pretrained(name, **kwargs)


def load_draft_to(
    name: str,
    dtype: torch.dtype,
    device: str,
    target: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Any:
    """
    Loads a draft in evaluation mode for a target of this dtype on this device, see `load_draft`. Heads are loaded
    without `dtype`, because they run in the target's; `mtp` needs the target. With the target and its `tokenizer`, a
    language model of another tokenizer comes as an `OtherVocabularyDrafter`.

    Raises:
        ImportError, OSError, ValueError: if no draft can be read.
        TypeError, ValueError: if its tokenizer cannot be compared with the target's, or the two share nothing.
    """
    if name in WORDS:
        return load_draft(name, target=target)
    check_place(name)
    kind = kind_of_draft(name)
    options = {"dtype": dtype} if kind == "model" else {}
    loader = _LOADERS[kind]
    if kind == "model" and target is not None and target.config.is_encoder_decoder and _needs_encoder(name, target):
        loader = type(target)
    draft = loader.from_pretrained(name, **options).to(device).eval()
    if kind != "model" or target is None or tokenizer is None:
        return draft
    return reading(draft, target, tokenizer, _tokenizer_beside(name))


def _tokenizer_beside(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a draft's files; None if there is none, as beside a draft with the target's."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


def _needs_encoder(name: str, target: PreTrainedModel) -> bool:
    """Whether a draft of an encoder-decoder model's kind has to be read with its own encoder."""
    config = AutoConfig.from_pretrained(name)
    if config.model_type != target.config.model_type or any("CausalLM" in one for one in config.architectures or ()):
        return False
    if config.model_type != "whisper":  # whose published drafts attend to the target's encoder, if its size is theirs
        return True
    sizes = ("d_model", "encoder_layers", "encoder_ffn_dim", "encoder_attention_heads")
    mine, its = ([getattr(one, size, None) for size in sizes] for one in (config, target.config))
    return mine != its


def check_place(name: str | None) -> None:
    """
    Checks that a name is a folder with files in it, or may be a Hub id that can be looked for.

    Raises:
        OSError: if it is neither, or the Hub cannot be reached.
    """
    if name is None:
        return
    folder = Path(name)
    if folder.is_dir() and not any(folder.iterdir()):
        raise OSError(f"The folder {name!r} is empty. Name one with a model's files (config.json, *.safetensors).")
    if not folder.exists() and not _is_hub_id(name):
        raise OSError(f"There is no folder {name!r}, and it is no Hub id (owner/name). Name one that exists.")
    HubOptions().check(name)


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def kind_of_draft(name: str, **kwargs: Any) -> str:
    """
    The kind of a draft, by its config and the names of its weights: `eagle`, `block`, `medusa`, `gemma` or `model`,
    see `kind_of_checkpoint`. Of the weights, only the names are read.

    Args:
        name (`str`): Hub id or folder.
        kwargs: arguments of `from_pretrained`, of which those count that say where the files are.

    Raises:
        OSError: if there is no such folder or repository, or it holds no weights.
        ValueError: if a file is damaged, or the draft of a kind that is not loaded.
    """
    options = HubOptions(**{field.name: kwargs[field.name] for field in fields(HubOptions) if field.name in kwargs})
    options.check(name)
    config = read_config(name, options.find(name, "config.json"))
    model_type = config.get("model_type")
    if str(model_type).endswith("_assistant") and model_type not in GEMMA_ASSISTANTS:
        raise ValueError(
            f"{name}: `model_type`={config['model_type']!r}: an assistant that reads its target's keys and values, "
            "with which this version does not draft. Name a head, a model, or 'ngram'."
        )
    is_medusa = kind_of_checkpoint(config, ()) == "medusa"  # whose weights are in other files
    keys = () if is_medusa else tensor_names(find_first(name, WEIGHT_FILES, options))
    return kind_of_checkpoint(config, keys)
