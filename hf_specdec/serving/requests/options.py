"""The options of a `generation_config`: one typed table, from which they are checked, described and fuzzed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, WithJsonSchema, model_validator

from ...trees import AutoTree, DynamicTree, TokenTree, as_tree
from ...trees.token_tree import MAX_NODES
from ..characters import shortened
from ..stop_strings import LONGEST_STOP_STRING, MOST_STOP_STRINGS, check_number_and_length, checked_stop_strings
from .kinds import (
    Boolean,
    Closed,
    Count,
    Cutoff,
    Length,
    ListOf,
    NgramSize,
    Number,
    Only,
    Positive,
    PositiveProbability,
    Probability,
    Seed,
    Temperature,
    Text,
    TokenId,
    checking,
    kind_of,
    wrong,
    wrong_field,
)


MOST_SEQUENCES = 1024
"""Most sequences of tokens in an option: each one is looked for at every step."""
LONGEST_SEQUENCE = 64
"""Most tokens of such a sequence."""
LONGEST_TREE = 32768
"""Most characters of a tree as text."""
_TREES = r"^(auto|default|(chain|branching|dynamic):[1-9][0-9]?(,[1-9][0-9]?)*|\[[(0-9,) ]+\])$"
_RANK = {"type": "integer", "minimum": 0}
LARGEST_VOCABULARY = 2**20


def _stop_strings(value: Any) -> Any:
    if value != "":  # which is none, like an empty list
        check_number_and_length(checked_stop_strings(value))
    return value


def _tree(value: Any) -> Any:
    if value is None or value == "default":  # as on the command line
        return None
    if isinstance(value, str) and len(value) > LONGEST_TREE:
        raise wrong(f"may have {LONGEST_TREE} characters. Use a smaller tree")
    try:
        tree = as_tree(value)
    except (TypeError, ValueError) as error:
        raise wrong(f"must be a tree ({shortened(str(error), 120)})") from error
    if isinstance(tree, DynamicTree) and tree.top_k > MAX_NODES:
        raise wrong(f"has `top_k={tree.top_k}`, and {MAX_NODES} is the most")
    if not isinstance(tree, (AutoTree, DynamicTree, TokenTree)):
        raise wrong("must be one tree, and no schedule: choose one of its trees")
    return value


_StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP_STRING)]
StopStrings = Annotated[
    Annotated[str, Field(max_length=LONGEST_STOP_STRING)]
    | Annotated[ListOf[_StopString], Field(max_length=MOST_STOP_STRINGS)],
    checking(_stop_strings),
]
Tree = Annotated[
    str | list[Any] | dict[str, Any] | None,
    BeforeValidator(_tree),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "maxLength": LONGEST_TREE, "pattern": _TREES},
                {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": _RANK}},
                {"type": "object"},
                {"type": "null"},
            ]
        }
    ),
]
Tokens = Annotated[ListOf[TokenId], Field(min_length=1, max_length=LARGEST_VOCABULARY)]
Sequence = Annotated[ListOf[TokenId], Field(min_length=1, max_length=LONGEST_SEQUENCE)]
Token = Annotated[
    Annotated[TokenId, Tag("<integer>")] | Annotated[Tokens, Tag("<list>")],
    Discriminator(kind_of, custom_error_type="wrong", custom_error_message="must be a token id or a list of them"),
]
"""A token, or some."""


def _end_kind(value: Any) -> str | None:
    return "<none>" if type(value) is int and value == -1 else kind_of(value)


End = Annotated[
    Annotated[Literal[-1], Tag("<none>")] | Annotated[TokenId, Tag("<integer>")] | Annotated[Tokens, Tag("<list>")],
    Discriminator(_end_kind, custom_error_type="wrong", custom_error_message="must be a token id, a list, or -1"),
]
"""Tokens that end the text; -1: none does."""


def _pair(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != 2:
        raise wrong("must be a list of two")
    return tuple(value)


Bias = Annotated[tuple[Sequence, Number], BeforeValidator(_pair)]
"""A sequence of tokens, and what is added to the score of its last one."""
Decay = Annotated[tuple[Count, Annotated[Positive, Field(le=10)]], BeforeValidator(_pair)]
"""A number of new tokens, and the factor by which the score of the end grows with each further one."""


class Watermark(Closed):
    """Options of a watermark (https://huggingface.co/papers/2306.04634), as in a `WatermarkingConfig`."""

    greenlist_ratio: Annotated[PositiveProbability, Field(lt=1)] = 0.25
    bias: Number = 2.0
    hashing_key: Length = 15485863
    seeding_scheme: Literal["lefthash", "selfhash"] = "lefthash"
    context_width: Annotated[NgramSize, Field(ge=1)] = 1


class GenerationOptions(Closed):
    """
    Options of `generate`, as a `GenerationConfig` has them. Of those that requests do not have, values that change
    nothing are allowed, so that the `generation_config.json` of a model can be sent.
    """

    # Lengths and ends.
    max_new_tokens: Length | None = None
    max_length: Length | None = None
    min_new_tokens: Count | None = None
    min_length: Count | None = None
    max_time: Positive | None = None
    stop_strings: StopStrings | None = None
    eos_token_id: End | None = None
    # Sampling.
    do_sample: Boolean | None = None
    temperature: Temperature | None = None
    top_k: Count | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    top_h: PositiveProbability | None = None
    typical_p: PositiveProbability | None = None
    epsilon_cutoff: Cutoff | None = None
    eta_cutoff: Cutoff | None = None
    seed: Seed | None = None
    # Scores.
    repetition_penalty: Positive | None = None
    encoder_repetition_penalty: Positive | None = None
    no_repeat_ngram_size: NgramSize | None = None
    encoder_no_repeat_ngram_size: NgramSize | None = None
    bad_words_ids: Annotated[ListOf[Sequence], Field(min_length=1, max_length=MOST_SEQUENCES)] | None = None
    sequence_bias: Annotated[ListOf[Bias], Field(min_length=1, max_length=MOST_SEQUENCES)] | None = None
    suppress_tokens: Tokens | None = None
    begin_suppress_tokens: Tokens | None = None
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: Token | None = None
    exponential_decay_length_penalty: Decay | None = None
    guidance_scale: Number | None = None
    watermarking_config: Watermark | None = None
    remove_invalid_values: Boolean | None = None
    renormalize_logits: Boolean | None = None
    # Speculation.
    tree: Tree = None
    # Without effect on a request.
    bos_token_id: TokenId | None = None
    pad_token_id: TokenId | None = None
    decoder_start_token_id: Token | None = None
    use_cache: Boolean | None = None
    disable_compile: Boolean | None = None
    transformers_version: Text | None = None
    from_model_config: Annotated[Boolean | None, Field(alias="_from_model_config")] = None
    # Not supported.
    num_beams: Annotated[Any, Only("1")] = None
    num_beam_groups: Annotated[Any, Only("1")] = None
    num_return_sequences: Annotated[Any, Only("1")] = None
    diversity_penalty: Annotated[Any, Only("0")] = None
    length_penalty: Annotated[Any, Only("1")] = None
    early_stopping: Annotated[Any, Only("false")] = None
    penalty_alpha: Annotated[Any, Only("0")] = None
    dola_layers: Annotated[Any, Only()] = None
    constraints: Annotated[Any, Only()] = None
    force_words_ids: Annotated[Any, Only()] = None
    low_memory: Annotated[Any, Only("false")] = None
    token_healing: Annotated[Any, Only("false")] = None
    cache_implementation: Annotated[Any, Only('"dynamic"')] = None
    cache_config: Annotated[Any, Only()] = None
    max_cache_len: Annotated[Any, Only()] = None
    compile_config: Annotated[Any, Only()] = None
    prefill_chunk_size: Annotated[Any, Only()] = None
    continuous_batching_config: Annotated[Any, Only()] = None
    speculative_config: Annotated[Any, Only(remedy="All requests have the server's. Give a `tree`.")] = None
    output_attentions: Annotated[Any, Only("false")] = None
    output_hidden_states: Annotated[Any, Only("false")] = None
    output_scores: Annotated[Any, Only("false")] = None
    output_logits: Annotated[Any, Only("false")] = None
    return_dict_in_generate: Annotated[Any, Only("false")] = None
    is_assistant: Annotated[Any, Only("false")] = None
    use_mtp: Annotated[Any, Only("false")] = None
    num_assistant_tokens: Annotated[Any, Only("20")] = None
    num_assistant_tokens_schedule: Annotated[Any, Only('"constant"')] = None
    assistant_confidence_threshold: Annotated[Any, Only("0.4")] = None
    assistant_early_exit: Annotated[Any, Only("0")] = None
    assistant_ensemble_weight: Annotated[Any, Only()] = None
    assistant_lookbehind: Annotated[Any, Only("10")] = None
    target_lookbehind: Annotated[Any, Only("10")] = None
    prompt_lookup_num_tokens: Annotated[Any, Only("0")] = None
    max_matching_ngram_size: Annotated[Any, Only()] = None
    speculation_type: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _has_an_end_to_favour(self, info: ValidationInfo) -> GenerationOptions:
        model_ends = info.context is None or info.context.has_end
        has_end = model_ends if self.eos_token_id is None else self.eos_token_id != -1
        if self.exponential_decay_length_penalty is not None and not has_end:
            raise wrong_field(
                "exponential_decay_length_penalty",
                "raises the score of an end token, but no token ends the text. Give an `eos_token_id`",
            )
        return self


_ASIDE = frozenset({"seed", "transformers_version", "from_model_config", "use_cache"})


def options_of(checked: GenerationOptions) -> dict[str, Any]:
    """The options that a `GenerationConfig` takes, without the seed, and without those that have no effect."""
    return {name: value for name, value in checked.model_dump(exclude_none=True).items() if name not in _ASIDE}
