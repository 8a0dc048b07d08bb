"""`BlockConfig`: what a head that drafts blocks is, whatever format it was published in."""

from __future__ import annotations

import copy
import math
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..checkpoints.layer_fields import as_layers_config, change_layers, windows_of
from ..head_config import HeadSizes


MARKOV_TYPES = ("vanilla", "gated", "rnn")
_WHOLE_NUMBERS = {
    "block_size": 2,
    "mask_token_id": 0,
    "target_hidden_size": 1,
    "num_target_layers": 1,
    "num_aux_features": 1,
    "draft_vocab_size": 1,
    "markov_rank": 0,
    "conv_kernel_size": 0,
    "conv_group_size": 1,
    "selector_rank": 0,
    "selector_top_k": 1,
}
"""Fields that hold whole numbers, with the least value of each."""


class BlockConfig(HeadSizes, PreTrainedConfig):
    """
    The configuration of a `BlockHead`. All published formats are read into this one.

    Args:
        text_config (`PreTrainedConfig` or `dict`):
            The head's decoder layers, as the config of a "qwen3" or "gemma4_text" model (P-EAGLE: "llama"): hidden
            size H, heads, MLP width, rotary embedding, layer types, sliding window. Its `vocab_size` is the target's.
        block_size (`int`, *optional*, defaults to 8):
            B, the rows of a block: the anchor and B - 1 masks. P-EAGLE: the number of tokens drafted in one forward.
        mask_token_id (`int`, *optional*): the token whose embedding stands for an unknown token. A head needs one.
        anchor_first (`bool`, *optional*, defaults to `False`):
            Whether block row k predicts the token k + 1 places after the anchor, so that the anchor's own row drafts
            the first of B tokens. Else row k predicts the token k places after the anchor, and B - 1 are drafted.
        causal (`bool`, *optional*, defaults to `False`):
            Whether block rows see only themselves and rows before them; else all rows of the block.
        window_is_causal (`bool`, *optional*, defaults to `True`):
            Whether this holds in layers with a sliding window, whatever `causal` says of the others.
        window_from_anchor (`bool`, *optional*, defaults to `False`):
            Whether all rows of a block see the context from `sliding_window` tokens before the anchor on, as heads are
            trained by speculators, and all rows of the block that causality allows. Else the window counts from each
            row, as in servers: a row sees less than `sliding_window` places back.
        is_peagle (`bool`, *optional*, defaults to `False`): whether the head is a P-EAGLE head, see `BlockHead`.
        target_hidden_size (`int`, *optional*): Hidden size Ht of the target. Defaults to the head's.
        num_target_layers (`int`, *optional*): layers of the target that the head was trained for; one with another
            number is refused. None: any.
        num_aux_features (`int`, *optional*): how many of the target's hidden states are concatenated. Defaults to the
            number of `aux_layer_ids`.
        aux_layer_ids (`list[int]`, *optional*):
            Which hidden states, as boundaries: k is the residual stream after k layers. `fc` reads them in ascending
            order. Defaults to z-lab's layers for a target with L layers, see `aux_boundaries`.
        draft_vocab_size (`int`, *optional*): Tokens that the head can propose. Defaults to all of the target's.
        markov_rank (`int`, *optional*, defaults to 0): rank r of the Markov head; 0: none.
        markov_type (`str`, *optional*, defaults to `"vanilla"`): "vanilla", "gated" or "rnn".
        has_confidence_head (`bool`, *optional*, defaults to `False`): whether the head estimates its acceptance.
        confidence_with_markov (`bool`, *optional*, defaults to `False`): whether the estimate reads the Markov
            embedding of the token before.
        conv_kernel_size (`int`, *optional*, defaults to 0): taps of the convolutions of DFlash 2; 0: none.
        conv_group_size (`int`, *optional*, defaults to 16): channels that share what the input adds to a kernel.
        selector_rank (`int`, *optional*, defaults to 0): rank of the candidate selector of DFlash 2; 0: none.
        selector_top_k (`int`, *optional*, defaults to 16): candidates per position.
        embedding_scale (`float`, *optional*, defaults to 1.0): factor of the block's embeddings.
        output_multiplier (`float`, *optional*, defaults to 1.0): factor of the logits, before the soft cap.
        final_logit_softcapping (`float`, *optional*): logits are capped softly at this value.
        norm_before_fc, fc_norm, norm_before_residual (`bool`, *optional*, defaults to `False`):
            P-EAGLE: as in `EagleConfig`.
        has_mask_embedding (`bool`, *optional*, defaults to `False`): whether an embedding of its own, which is no row
            of the vocabulary's, stands for an unknown token in place of the mask token's.
        has_embeddings (`bool`, *optional*, defaults to `False`): whether the head has token embeddings of its own;
            else it uses the target's.
        has_lm_head (`bool`, *optional*, defaults to `False`): whether the head has an lm_head of its own; else it uses
            the target's, or the rows of it that belong to the draft vocabulary.
        default_tree (`dict` or `list`, *optional*): the tree that a call without `tree=` takes.
        target_name (`str`, *optional*): the model that the head was trained for.
        recipe (`dict`, *optional*): how the head was trained: names and values, for its model card.
        source_format (`str`, *optional*): the published format that the head was read from.
        reasons (`dict[str, str]`, *optional*): by the name of a field, why it was read so; see `conventions`.

    Raises:
        ValueError: for an invalid value; see `check`.
    """

    model_type = "hf_specdec_block"
    sub_configs = {"text_config": AutoConfig}

    text_config: Any = None
    block_size: int = 8
    mask_token_id: int | None = None
    anchor_first: bool = False
    causal: bool = False
    window_is_causal: bool = True
    window_from_anchor: bool = False
    is_peagle: bool = False
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    num_aux_features: int | None = None
    aux_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    markov_type: str = "vanilla"
    has_confidence_head: bool = False
    confidence_with_markov: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    has_mask_embedding: bool = False
    has_embeddings: bool = False
    has_lm_head: bool = False
    default_tree: Any = None
    target_name: str | None = None
    recipe: dict[str, Any] | None = None
    source_format: str | None = None
    reasons: dict[str, str] | None = None

    # What `Eagle3Layer` asks, and what all P-EAGLE heads have.
    norm_embeddings = True
    norm_hidden_twice = False

    def __post_init__(self, **kwargs):
        from . import modeling_block  # noqa: F401  (which tells AutoModel what it makes of such a config)

        self.text_config = as_layers_config(self.text_config, "llama" if self.is_peagle else "qwen3")
        kwargs.pop("tie_word_embeddings", None)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.num_aux_features is None:
            defaults = 3 if self.is_peagle else self.text_config.num_hidden_layers
            self.num_aux_features = len(self.aux_layer_ids) if self.aux_layer_ids else defaults
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """
        Checks the values of the fields.

        Raises:
            ValueError: naming the field whose value is impossible, or does not fit another.
        """
        if self.block_size == 1:
            raise ValueError(
                f"`block_size` must be a whole number of at least 2, but is {self.block_size!r}: a block of one row "
                "has no masks, and drafts nothing in parallel."
            )
        self.check_whole_numbers(_WHOLE_NUMBERS)
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"`mask_token_id`={self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens. It must "
                "be the token whose embedding the head was trained with in place of unknown tokens."
            )
        for field in ("embedding_scale", "output_multiplier", "final_logit_softcapping"):
            value = getattr(self, field)
            if value is not None and not _is_positive(value):
                raise ValueError(f"`{field}` must be a positive number, but is {value!r}.")
        for field in ("anchor_first", "causal", "window_is_causal", "window_from_anchor", "has_mask_embedding"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"`{field}` must be True or False, but is {getattr(self, field)!r}.")
        self._check_heads()
        self.check_layer_ids("layer numbers (boundaries)")

    def _check_heads(self) -> None:
        """Checks the fields of what stands around the decoder layers."""
        for field in ("window_from_anchor", "has_mask_embedding"):
            if self.is_peagle and getattr(self, field):
                raise ValueError(f"`{field}`=True is for heads with an anchor; P-EAGLE heads have none.")
        if self.markov_type not in MARKOV_TYPES:
            raise ValueError(
                f"`markov_type` must be one of {', '.join(map(repr, MARKOV_TYPES))}, but is {self.markov_type!r}."
            )
        if self.confidence_with_markov and not self.markov_rank:
            raise ValueError("`confidence_with_markov`=True needs a Markov head, but `markov_rank` is 0.")
        if self.markov_rank and self.selector_rank:
            raise ValueError(
                f"`markov_rank`={self.markov_rank} and `selector_rank`={self.selector_rank}: a head has a Markov head "
                "or a candidate selector, not both."
            )
        if self.selector_rank and self.selector_top_k > self.num_draft_tokens:
            raise ValueError(
                f"`selector_top_k`={self.selector_top_k} is more than the {self.num_draft_tokens} tokens of the draft "
                "vocabulary."
            )
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"`conv_group_size`={self.conv_group_size} must divide the hidden size {self.hidden_size}."
            )

    def changed(self, **fields: Any) -> BlockConfig:
        """
        A checked copy with other values. `aux_layer_ids` are boundaries; `rope_theta` goes to
        `text_config.rope_parameters`, and a dict for `text_config` changes the fields that it names.

        Raises:
            ValueError: as in `check`, for a `rope_theta` that is not a positive number, and if there is no mask token.
        """
        config = copy.deepcopy(self)
        given = dict.fromkeys(fields, "given as an argument")
        config.reasons = ({**(self.reasons or {}), **given}) or None
        change_layers(config, fields)
        for field, value in fields.items():
            setattr(config, field, value)
        config.check()
        _ = config.mask_token
        return config

    # ------------------------------------------------------------------------------------------------------- derived

    @property
    def kind(self) -> str:
        """The head's method: "peagle", "dflash2", "dspark" or "dflash" (JetSpec too, which is causal)."""
        if self.is_peagle:
            return "peagle"
        if self.conv_kernel_size or self.selector_rank:
            return "dflash2"
        return "dspark" if self.markov_rank or self.has_confidence_head else "dflash"

    @property
    def mask_token(self) -> int:
        """
        `mask_token_id`, which a head needs. Any token with `has_mask_embedding`: its embedding is not read.

        Raises:
            ValueError: if it is None.
        """
        if self.mask_token_id is None and self.has_mask_embedding:
            return 0
        if self.mask_token_id is None:
            raise ValueError(
                f"{self.name_or_path}: `mask_token_id` is missing in config.json, and no weight tells which token the "
                "head was trained with in place of unknown ones. Pass `BlockHead.from_pretrained(…, mask_token_id=…)`."
            )
        return self.mask_token_id

    @property
    def num_drafts(self) -> int:
        """Tokens that the head drafts in one forward: the most levels of a tree."""
        return self.block_size if self.is_peagle or self.anchor_first else self.block_size - 1

    @property
    def num_rows(self) -> int:
        """Rows of a block: anchor and masks; P-EAGLE: the masks alone."""
        return self.block_size - 1 if self.is_peagle else self.block_size

    def aux_boundaries(self, num_layers: int) -> list[int]:
        """
        The hidden states that the head reads, ascending, as boundaries: k is the residual stream after k of the
        target's `num_layers` layers (transformers' `hidden_states[k]`, but before the final norm also at k =
        `num_layers`).

        Without `aux_layer_ids`, they are z-lab's for that many features (P-EAGLE: the default ones of EAGLE-3).

        Raises:
            ValueError: if the target has no such layers.
        """
        ids = self.aux_layer_ids
        if ids is None:
            ids = (
                [2, num_layers // 2, num_layers - 3]
                if self.is_peagle
                else spread_layers(num_layers, self.num_aux_features or 1)
            )
        if any(layer < 0 or layer > num_layers for layer in ids):
            raise ValueError(
                f"`aux_layer_ids`={list(ids)} (boundaries) name hidden states that a target with {num_layers} layers "
                "does not have. Check the target, or pass `BlockHead.from_pretrained(…, aux_layer_ids=[…])`."
            )
        return sorted(ids)

    @property
    def conventions(self) -> dict[str, str]:
        """How the head is read where its weights cannot tell, by field: the value, what it means, and why."""
        first = "row 0, the anchor's," if self.anchor_first else "row 1"
        stated = {
            "block_size": f"{self.block_size}: {self.num_drafts} tokens are drafted",
            "mask_token_id": "not read: masks have an embedding of their own"
            if self.has_mask_embedding
            else f"{self.mask_token_id}",
            "anchor_first": f"{self.anchor_first}: {first} predicts the next token",
            "causal": f"{self.causal}: block rows see {'no later rows' if self.causal else 'all rows of the block'}",
            "aux_layer_ids": f"{self.aux_layer_ids} (boundaries)",
            "rope_theta": ", ".join(map(str, _rope_thetas(self.text_config))),
        }
        if self.is_peagle:
            del stated["anchor_first"], stated["causal"]
        if any(windows_of(self.text_config)) and not self.is_peagle:
            seen = "no later rows" if self.causal or self.window_is_causal else "all later rows of the block"
            stated["window_is_causal"] = (
                f"{self.window_is_causal}: in layers with a window of {self.text_config.sliding_window}, block rows "
                f"see {seen}"
            )
            counted = "the anchor, for all rows of a block" if self.window_from_anchor else "each row"
            stated["window_from_anchor"] = f"{self.window_from_anchor}: the window counts from {counted}"
        reasons = self.reasons or {}
        stated |= {field: "" for field in reasons if field not in stated}
        return {field: " — ".join(filter(None, (value, reasons.get(field)))) for field, value in stated.items()}


def spread_layers(num_layers: int, count: int) -> list[int]:
    """
    The boundaries that z-lab's heads read where their config names none: of a target with `num_layers` layers, as many
    as the draft has (`build_target_layer_ids` of z-lab/dflash, which counts outputs of layers).
    """
    if count == 1:
        return [num_layers // 2 + 1]
    return [round(1 + index * (num_layers - 4) / (count - 1)) + 1 for index in range(count)]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _rope_thetas(config: PreTrainedConfig) -> list[float]:
    rope = config.rope_parameters or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return [part["rope_theta"] for part in parts if "rope_theta" in part]


AutoConfig.register(BlockConfig.model_type, BlockConfig, exist_ok=True)
