"""`EagleConfig`: what an EAGLE head is, whatever format it was published in."""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..checkpoints.layer_fields import as_layers_config, change_layers
from ..head_config import HeadSizes


LAYER_CONVENTIONS = ("auto", "boundaries", "outputs")
# Entries of `conventions` that another field settles.
_ALSO_SAID = {
    "aux_layer_convention": ("aux_layer_ids",),
    "has_embeddings": ("embed_tokens",),
    "has_lm_head": ("lm_head",),
}


class EagleConfig(HeadSizes, PreTrainedConfig):
    """
    The configuration of an `EagleHead`. All published formats are read into this one.

    Args:
        text_config (`PreTrainedConfig` or `dict`):
            The head's decoder layers, as the config of a "llama", "qwen2" or "qwen3" model: hidden size H, heads, MLP
            width, rotary embedding, sliding window. Its `vocab_size` is the target's.
        eagle_version (`int`, *optional*, defaults to 3):
            1: the head reads the target's last hidden state and predicts through the target's lm_head (EAGLE-2 and
            HASS heads are of this kind). 3: the head reads hidden states of several layers and has its own lm_head.
        target_hidden_size (`int`, *optional*):
            Hidden size Ht of the target. Defaults to the head's.
        num_aux_features (`int`, *optional*, defaults to 3):
            EAGLE-3: how many of the target's hidden states are concatenated. 0: the head reads the target's last
            hidden state, after its final norm.
        aux_layer_ids (`list[int]`, *optional*):
            EAGLE-3: which hidden states, numbered as `aux_layer_convention` says. Defaults to the boundaries
            [2, L // 2, L - 3] of a target with L layers.
        aux_layer_convention (`str`, *optional*, defaults to `"boundaries"`):
            "boundaries": k is the residual stream after k layers. "outputs": k is the output of the layer with index
            k, which is boundary k + 1. "auto": told from the numbers, see `aux_boundaries`.
        draft_vocab_size (`int`, *optional*):
            Tokens that the head can propose. Defaults to all of the target's.
        has_fc (`bool`, *optional*, defaults to `True`): whether features go through a projection `fc`.
        fc_bias (`bool`, *optional*, defaults to `False`): whether `fc` has a bias.
        norm_before_fc (`bool`, *optional*, defaults to `False`): whether one norm comes before `fc`.
        fc_norm (`bool`, *optional*, defaults to `False`): whether each feature has a norm of its own before `fc`.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            EAGLE-3: whether the first layer's residual is the normed hidden state.
        norm_hidden_twice (`bool`, *optional*, defaults to `False`):
            EAGLE-3: whether the hidden state passes `input_layernorm` before `hidden_norm`, as in ModelOpt from 0.41
            on.
        norm_embeddings (`bool`, *optional*, defaults to `True`):
            EAGLE-3: whether embeddings pass `input_layernorm`.
        norm_output (`bool`, *optional*, defaults to `False`):
            EAGLE-3: whether the state that is fed back has passed the final norm.
        final_norm (`bool`, *optional*, defaults to `True`): EAGLE-3: whether there is a norm before the lm_head.
        has_embeddings (`bool`, *optional*, defaults to `False`): whether the head has token embeddings of its own;
            else it uses the target's.
        has_lm_head (`bool`, *optional*):
            Whether the head has an lm_head of its own; else it uses the target's, or the rows of it that belong to the
            draft vocabulary. Defaults to True for EAGLE-3, False for EAGLE-1.
        default_tree (`dict` or `list`, *optional*): the tree that a call without `tree=` takes.
        target_name (`str`, *optional*): the model that the head was trained for.
        recipe (`dict`, *optional*): how the head was trained: names and values, for its model card.
        source_format (`str`, *optional*): the published format that the head was read from.
        conventions (`dict[str, str]`, *optional*): what had to be assumed when the checkpoint was read, and why.

    Raises:
        ValueError: for an invalid value; see `check`.
    """

    model_type = "hf_specdec_eagle"
    sub_configs = {"text_config": AutoConfig}

    text_config: Any = None
    eagle_version: int = 3
    target_hidden_size: int | None = None
    num_aux_features: int | None = None
    aux_layer_ids: list[int] | None = None
    aux_layer_convention: str = "boundaries"
    draft_vocab_size: int | None = None
    has_fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_hidden_twice: bool = False
    norm_embeddings: bool = True
    norm_output: bool = False
    final_norm: bool = True
    has_embeddings: bool = False
    has_lm_head: bool | None = None
    default_tree: Any = None
    target_name: str | None = None
    recipe: dict[str, Any] | None = None
    source_format: str | None = None
    conventions: dict[str, str] | None = None

    def __post_init__(self, **kwargs):
        from . import modeling_eagle  # noqa: F401  (which tells AutoModel what it makes of such a config)

        self.text_config = as_layers_config(self.text_config, "llama")
        kwargs.pop("tie_word_embeddings", None)
        if self.num_aux_features is None:
            self.num_aux_features = 0 if self.eagle_version == 1 else len(self.aux_layer_ids or (0, 0, 0))
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.has_lm_head is None:
            self.has_lm_head = self.eagle_version == 3
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """
        Checks the values of the fields.

        Raises:
            ValueError: naming the field whose value is impossible, or does not fit another.
        """
        if self.eagle_version not in (1, 3):
            raise ValueError(f"`eagle_version` must be 1 or 3, but is {self.eagle_version!r}.")
        if self.eagle_version == 1 and not self.has_fc:
            raise ValueError("`has_fc`=False: heads of version 1 join features and embeddings by `fc`. Leave it out.")
        self.check_whole_numbers({"target_hidden_size": 1, "draft_vocab_size": 1, "num_aux_features": 0})
        if self.aux_layer_convention not in LAYER_CONVENTIONS:
            raise ValueError(
                f"`aux_layer_convention` must be one of {', '.join(map(repr, LAYER_CONVENTIONS))}, but is "
                f"{self.aux_layer_convention!r}."
            )
        self.check_layer_ids()

    def changed(self, **fields: Any) -> EagleConfig:
        """
        A checked copy with other values. `aux_layer_ids` are boundaries unless `aux_layer_convention` is given too;
        `rope_theta` goes to `text_config.rope_parameters`, and a dict for `text_config` changes the fields that it
        names. The fields' entries in `conventions` are dropped.

        Raises:
            ValueError: as in `check`, and for a `rope_theta` that is not a positive number.
        """
        config = copy.deepcopy(self)
        said = set(fields).union(*(_ALSO_SAID.get(field, ()) for field in fields))
        config.conventions = {key: why for key, why in (self.conventions or {}).items() if key not in said} or None
        change_layers(config, fields)
        if "aux_layer_ids" in fields:
            fields = {"aux_layer_convention": "boundaries"} | fields
        for field, value in fields.items():
            setattr(config, field, value)
        config.check()
        return config

    def aux_boundaries(self, num_layers: int) -> list[int]:
        """
        The hidden states that the head reads, ascending, as boundaries: k is the residual stream after k of the
        target's `num_layers` layers (transformers' `hidden_states[k]`, but before the final norm also at k =
        `num_layers`).

        Under "auto", the published ids are boundaries if they equal the default boundaries or name `num_layers`; they
        are layer outputs if they equal the default outputs or begin with 0 (boundary 0 would be the embeddings, which
        no trainer takes) or 1; else they are taken as boundaries.

        Raises:
            ValueError: if the target has no such layers, or `aux_layer_ids` is needed and missing.
        """
        if self.num_aux_features == 0:
            return []
        defaults = _default_boundaries(num_layers)
        if self.aux_layer_ids is None and self.num_aux_features != 3:
            raise ValueError(
                f"`aux_layer_ids`: the head reads {self.num_aux_features} features, for which there is no default. "
                "Pass `EagleHead.from_pretrained(…, aux_layer_ids=[…])`."
            )
        ids = defaults if self.aux_layer_ids is None else list(self.aux_layer_ids)
        if self.aux_layer_ids is not None and self._are_outputs(ids, defaults, num_layers):
            ids = [layer + 1 for layer in ids]
        if any(layer < 0 or layer > num_layers for layer in ids):
            raise ValueError(
                f"`aux_layer_ids`={self.aux_layer_ids or ids} ({self.aux_layer_convention!r}) name hidden states that "
                f"a target with {num_layers} layers does not have. Check the target, or pass "
                "`EagleHead.from_pretrained(…, aux_layer_ids=[…])`."
            )
        return sorted(ids)

    @property
    def has_open_numbering(self) -> bool:
        """
        Whether `aux_layer_ids` may be boundaries as well as layer outputs: under "auto", numbers that do not begin
        with 0 or 1, and are no target's default boundaries.
        """
        if self.aux_layer_convention != "auto" or not self.aux_layer_ids:
            return False
        ids = sorted(self.aux_layer_ids)
        return ids[0] > 1 and ids != _default_boundaries(ids[-1] + 3)

    def _are_outputs(self, ids: list[int], defaults: list[int], num_layers: int) -> bool:
        if self.aux_layer_convention != "auto":
            return self.aux_layer_convention == "outputs"
        ids = sorted(ids)
        if ids == defaults or num_layers in ids:
            return False
        return ids == [layer - 1 for layer in defaults] or ids[0] <= 1


def _default_boundaries(num_layers: int) -> list[int]:
    """The boundaries that SafeAILab, vLLM and speculators read of a target with `num_layers` layers."""
    return [2, num_layers // 2, num_layers - 3]


AutoConfig.register(EagleConfig.model_type, EagleConfig, exist_ok=True)
