"""Targets, and other models over trees, that cannot be served are refused by name."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from ..attention import implementation_of, is_exact, obstacle_to_branches, supports_switching, tells_selection
from ..compat import CACHE, INDEXED, NO_TREES, TREES_FROM, cache_argument, own_cache_layer
from ..config import SpeculativeConfig
from ..drafters import Drafter
from ..models.hooks import check_hooks
from ..models.modules import modules_of
from ..models.own_positions import preparation_of
from ..models.reasons import Reason
from ..models.structure import attends_to_images_apart, forward_parameters
from ..plan import only_chains
from ..ranks import is_pipeline
from ..states import layer_kinds_of, mixers_of_their_own


_STATE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Kinds of layers that hold a state, which may follow a tree."""

_ONE_AT_A_TIME = ("cpmant", "fsmt", "prophetnet")
"""Architectures whose forward fails with several tokens behind a cache, or lets each attend to all."""


_PLAIN_LAYERS = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "attention",
        "moe",
        "mlp",
        "dense",
        "sparse",
        "dummy",
    }
)
"""Kinds of layers (`config.layer_types`) that are attention over earlier tokens, or hold no state at all."""


def check_target(model: PreTrainedModel) -> None:
    """
    Checks a target.

    Raises:
        ValueError: for a kind of model that cannot read a tree, or decodes in its own way.
    """
    name = type(model).__name__
    if is_pipeline(model):
        raise ValueError(
            f"`assistant_model`: the layers of the target {name} are spread over processes (`pp_size`), which is not "
            "supported. Load it with `tp_plan` or `device_map`."
        )
    check_attention(model, "target")
    _check_decoding(model)
    if any(hasattr(kind, "prepare_dynamic_mask") for kind in {type(module) for module in modules_of(model)}):
        raise ValueError(
            f"`assistant_model`: the target {name} {Reason.MASK}: it adds a learned bias to its own. Call `generate` "
            "without `assistant_model`."
        )
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    peft_config = getattr(owner, "active_peft_config", None)
    if peft_config is not None and peft_config.is_prompt_learning:
        raise ValueError(
            f"`assistant_model`: the target is tuned with {peft_config.peft_type} (a learned prompt), which a tree "
            "cannot follow. Use a LoRA-like adapter, or call `generate` without `assistant_model`."
        )
    if not preparation_of(model).keeps_tokens_and_cache:
        raise ValueError(
            f"`assistant_model`: the target {name} {Reason.OTHER_TOKENS}: its `prepare_inputs_for_generation` "
            "replaces tokens or cache. Call `generate` without `assistant_model`."
        )


def check_batching(model: PreTrainedModel) -> None:
    """
    Checks a target of requests that share steps.

    Raises:
        ValueError: for a model that reads a chain in one row alone.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"`assistant_model`: the target {type(model).__name__} {Reason.ENCODER}, whose requests are more than "
            "tokens. Use `generate`."
        )
    obstacle = obstacle_to_branches(model)
    if obstacle is not None:
        raise ValueError(
            f"`assistant_model`: the target {type(model).__name__} {obstacle}; rows of unequal length need it, too. "
            "Use `generate` with one row and a chain."
        )


def check_rows(model: PreTrainedModel, drafter: Drafter, rows: int) -> None:
    """
    Checks the number of rows of a call.

    Raises:
        ValueError: for several rows of models that read nothing but a chain in one row.
    """
    obstacle = only_chains(model, drafter)
    if rows > 1 and obstacle is not None:
        raise ValueError(
            f"`assistant_model`: {obstacle}; rows of unequal length need it, too. Pass one row, or call `generate` "
            "without `assistant_model`."
        )


def check_foreign_hooks(model: PreTrainedModel, drafter: Drafter, config: SpeculativeConfig) -> None:
    """
    Warns of forward hooks of the user's on target or draft, or refuses them, as the config says.

    Raises:
        ValueError: if there are any, and `config.on_foreign_hooks` is `"refuse"`.
    """
    others = [draft for draft in drafter.parts if draft is not model]
    check_hooks({"target": [model], "draft": others}, config.on_foreign_hooks)


def check_attention(model: PreTrainedModel, role: str) -> None:
    """
    Checks that every layer of a model is attention over all earlier tokens, or over a part of them that can be told
    for a tree, or holds a state that can follow one.

    Args:
        model (`PreTrainedModel`): a target or a draft.
        role (`str`): which of them, for messages.

    Raises:
        ValueError: if it is not.
    """
    name = type(model).__name__
    text_config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if not kinds and getattr(text_config, "attention_chunk_size", None):
        raise ValueError(
            f"`assistant_model`: the {role} {name} {Reason.SPARSE} (chunks), but its config does not tell in which "
            "layers (`layer_types`). Call `generate` without `assistant_model`."
        )
    _check_kinds(model, role, kinds)
    if supports_switching(model) and not is_exact(implementation_of(model)):
        raise ValueError(
            f"`attn_implementation`={implementation_of(model)!r} of the {role} {name} is not one of transformers' "
            "own, and cannot be replaced over a tree, because it may compute something else. Load the model with "
            "'sdpa' or 'eager', or call `generate` without `assistant_model`."
        )
    parameters = forward_parameters(model)
    masks_encoder = not {"cross_attention_mask", "image_encoder_embeddings"}.isdisjoint(parameters)
    if masks_encoder and not attends_to_images_apart(model):
        raise ValueError(
            f"`assistant_model`: the {role} {name} {Reason.CROSS_ATTENTION}. Call `generate` without "
            " `assistant_model`."
        )
    if text_config.model_type in NO_TREES:
        raise ValueError(
            f"`assistant_model`: the {role} {name} {Reason.MASK} before transformers "
            f"{'.'.join(map(str, TREES_FROM))}. Update transformers, or call `generate` without `assistant_model`."
        )
    if text_config.model_type in _ONE_AT_A_TIME:
        raise ValueError(
            f"`assistant_model`: the {role} {name} {Reason.ONE_TOKEN}. Call `generate` without `assistant_model`."
        )
    if not cache_argument(parameters):
        raise ValueError(
            f"`assistant_model`: the {role} {name} {Reason.CACHE} (`{CACHE}`), which the nodes of a tree need. Call "
            "`generate` without `assistant_model`."
        )


def _check_decoding(model: PreTrainedModel) -> None:
    """The target must decode as `GenerationMixin` does."""
    name = type(model).__name__
    modes = getattr(model, "_supported_generation_modes", None)
    if type(model)._sample is not GenerationMixin._sample or (
        modes is not None and GenerationMode.ASSISTED_GENERATION not in modes
    ):
        raise ValueError(
            f"`assistant_model`: the target {name} {Reason.LOOP}. Call `generate` without `assistant_model`."
        )


def _check_kinds(model: PreTrainedModel, role: str, kinds: set[str]) -> None:
    """
    No layer may hold a state by code of its own, or select what it attends to without telling. `kinds`: those of the
    layers, if known.
    """
    selecting = INDEXED if tells_selection(model) else frozenset()
    others = sorted(kinds - _PLAIN_LAYERS - selecting)
    if layer_kinds_of(model) is not None:
        _check_states(model, role)
        others = sorted(set(others) - _STATE_LAYERS)
        if not others:
            return
    if not others and (kinds or not model._is_stateful):  # the flag is that of a class, whose layers are chosen
        return
    sparse = [
        kind for kind in others if kind in INDEXED or (kind.endswith("attention") and kind != "linear_attention")
    ]
    states = [kind for kind in others if kind not in sparse]
    parts = []
    if states or not sparse:
        parts.append(_states_elsewhere(states))
    if sparse:
        own = sorted({layer.__name__ for kind in sparse if (layer := own_cache_layer(kind)) is not None})
        parts.append(
            f"{Reason.SPARSE} ({', '.join(sparse)}), which selects tokens without regard to a tree"
            + (f" and joins them in cache layers of its own ({', '.join(own)})" if own else "")
        )
    raise ValueError(
        f"`assistant_model`: the {role} {type(model).__name__} {', and '.join(parts)}. Call `generate` without "
        "`assistant_model`."
    )


def _states_elsewhere(kinds: list[str]) -> str:
    which = f" ({', '.join(kinds)})" if kinds else ""
    return f"{Reason.STATES}{which}, whose state cannot hold a tree: it is kept outside of transformers' cache"


def _check_states(model: PreTrainedModel, role: str) -> None:
    """States must change by functions that can run over a tree."""
    name = type(model).__name__
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    own = sorted(_STATE_LAYERS & set(kinds))
    if mixers_of_their_own(model) is None:
        raise ValueError(
            f"`assistant_model`: the {role} {name} {_states_elsewhere(own)}. Call `generate` without "
            "`assistant_model`."
        )
    if getattr(model, "use_kernels", False):
        raise ValueError(
            f"`use_kernels=True`: kernels from the Hub replace the recurrent or convolutional layers of the {role} "
            f"{name} as a whole, which a tree cannot follow. Load it without `use_kernels`."
        )
