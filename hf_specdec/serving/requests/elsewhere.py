"""
Options of other servers (vLLM, SGLang, llama.cpp) that their clients send whether they need them or not. A value that
asks for what happens anyway is taken, any other one is refused. Handlers and engine get neither.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .kinds import Boolean, Closed, ListOf, Number, Only, Text


_FORM = "Give `structured_outputs`, or leave it out."
_OF_GENERATE = "Give it in `generation_config`, or leave it out."
_PROMPT = "Use `/v1/completions`, which takes text as it is, or leave it out."
_SCORES = "Only tokens of the answer are scored: give `logprobs` for these."


class OfTexts(Closed):
    """Options of other servers that all requests for a text may have."""

    # How tokens are chosen.
    use_beam_search: Annotated[Any, Only("false")] = None
    length_penalty: Annotated[Any, Only("1")] = None
    early_stopping: Annotated[Any, Only("false")] = None
    typical_p: Annotated[Any, Only("1", remedy=_OF_GENERATE)] = None
    typ_p: Annotated[Any, Only("1", remedy="Give `generation_config.typical_p`, or leave it out.")] = None
    tfs_z: Annotated[Any, Only("1")] = None
    top_a: Annotated[Any, Only("0")] = None
    top_n_sigma: Annotated[Any, Only("-1", "0")] = None
    repeat_last_n: Annotated[Any, Only("-1", remedy="Leave it out: penalties read the whole text.")] = None
    repeat_penalty: Annotated[Any, Only("1", remedy="Give `repetition_penalty`, or leave it out.")] = None
    dry_multiplier: Annotated[Any, Only("0")] = None
    xtc_probability: Annotated[Any, Only("0")] = None
    mirostat: Annotated[Any, Only("0")] = None
    dynatemp_range: Annotated[Any, Only("0")] = None
    min_keep: Annotated[Any, Only("0")] = None
    samplers: Annotated[Any, Only(remedy="Leave it out: their order is that of `generate`.")] = None
    logits_processors: Annotated[Any, Only("[]")] = None
    custom_logit_processor: Annotated[Any, Only()] = None
    bad_words: Annotated[
        Any, Only("[]", remedy="Give token ids in `generation_config.bad_words_ids`, or leave it out.")
    ] = None
    allowed_token_ids: Annotated[Any, Only(remedy=_FORM)] = None
    # Of what those above switch on.
    dry_base: Number | None = None
    dry_allowed_length: Number | None = None
    dry_penalty_last_n: Number | None = None
    dry_sequence_breakers: Text | ListOf[Text] | None = None
    xtc_threshold: Number | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    dynatemp_exponent: Number | None = None
    truncation_side: Literal["left", "right"] | None = None
    # What form an answer has.
    guided_json: Annotated[Any, Only(remedy=_FORM)] = None
    guided_regex: Annotated[Any, Only(remedy=_FORM)] = None
    guided_choice: Annotated[Any, Only("[]", remedy=_FORM)] = None
    guided_grammar: Annotated[Any, Only(remedy=_FORM)] = None
    guided_decoding_backend: Text | None = None
    guided_whitespace_pattern: Annotated[
        Any, Only(remedy="Give `structured_outputs.whitespace_pattern`, or leave it out.")
    ] = None
    structural_tag: Annotated[Any, Only(remedy=_FORM)] = None
    grammar: Annotated[Any, Only('""', remedy=_FORM)] = None
    json_schema: Annotated[Any, Only(remedy=_FORM)] = None
    regex: Annotated[Any, Only('""', remedy=_FORM)] = None
    ebnf: Annotated[Any, Only('""', remedy=_FORM)] = None
    # How long it is, and what ends it.
    include_stop_str_in_output: Annotated[Any, Only("false")] = None
    no_stop_trim: Annotated[Any, Only("false")] = None
    stop_regex: Annotated[Any, Only("[]", '""')] = None
    t_max_predict_ms: Annotated[
        Any, Only("0", remedy="Give seconds in `generation_config.max_time`, or leave it out.")
    ] = None
    n_indent: Annotated[Any, Only("0")] = None
    n_cmpl: Annotated[Any, Only("1", remedy="Give `n`, or leave it out.")] = None
    thinking_token_budget: Annotated[Any, Only("-1")] = None
    repetition_detection: Annotated[Any, Only()] = None
    # What is answered.
    detokenize: Annotated[Any, Only("true")] = None
    skip_special_tokens: Annotated[Any, Only("true")] = None
    spaces_between_special_tokens: Boolean | None = None  # which are none
    prompt_logprobs: Annotated[Any, Only(remedy=_SCORES)] = None
    logprob_token_ids: Annotated[Any, Only()] = None
    n_probs: Annotated[Any, Only("0", remedy="Give `logprobs`, or leave it out.")] = None
    post_sampling_probs: Annotated[
        Any, Only("false", remedy="Leave it out, or serve with `--logprobs-mode processed`.")
    ] = None
    return_token_ids: Annotated[Any, Only("false")] = None
    return_tokens: Annotated[Any, Only("false")] = None
    return_tokens_as_token_ids: Annotated[Any, Only("false")] = None
    return_token_offsets: Annotated[Any, Only("false")] = None
    return_prompt_text: Annotated[Any, Only("false", remedy="Ask `/tokenize`, or leave it out.")] = None
    return_hidden_states: Annotated[Any, Only("false")] = None
    return_progress: Annotated[Any, Only("false")] = None
    timings_per_token: Annotated[Any, Only("false")] = None
    response_fields: Annotated[Any, Only("[]")] = None
    stream_interval: Annotated[Any, Only("1")] = None
    sse_ping_interval: Annotated[Any, Only("-1")] = None
    # What is read.
    truncate_prompt_tokens: Annotated[Any, Only(remedy="Shorten the prompt: none is cut here.")] = None
    prompt_embeds: Annotated[Any, Only(remedy="Give text or token ids.")] = None
    media_io_kwargs: Annotated[Any, Only("{}")] = None
    mm_processor_kwargs: Annotated[Any, Only("{}")] = None
    lora: Annotated[Any, Only("[]", remedy="Name an adapter in `model`, or leave it out.")] = None
    lora_path: Annotated[Any, Only(remedy="Name an adapter in `model`, or leave it out.")] = None
    # Where and how it is computed.
    cache_prompt: Annotated[Any, Only("true", remedy="Leave it out, or serve with `--no-enable-prefix-caching`.")] = (
        None
    )
    cache_salt: Annotated[Any, Only(remedy="Leave it out, or serve with `--no-enable-prefix-caching`.")] = None
    n_cache_reuse: Annotated[Any, Only("0")] = None
    n_keep: Number | None = None  # no prompt is cut
    n_discard: Number | None = None
    id_slot: Annotated[Any, Only("-1")] = None
    backend_sampling: Boolean | None = None
    kv_transfer_params: Annotated[Any, Only("{}")] = None
    ec_transfer_params: Annotated[Any, Only("{}")] = None
    vllm_xargs: Annotated[Any, Only("{}")] = None
    request_id: Annotated[Any, Only(remedy="Give it in the header `X-Request-ID`.")] = None
    rid: Annotated[Any, Only(remedy="Give it in the header `X-Request-ID`.")] = None
    session_id: Text | None = None


class OfConversations(OfTexts):
    """Options of other servers that chats and responses may have."""

    add_generation_prompt: Annotated[Any, Only("true", remedy=_PROMPT)] = None
    continue_final_message: Annotated[Any, Only("false", remedy=_PROMPT)] = None
    add_special_tokens: Annotated[Any, Only("false", remedy=_PROMPT)] = None
    echo: Annotated[Any, Only("false")] = None
    documents: Annotated[Any, Only("[]", remedy="Give their text in a message.")] = None
    chat_template: Annotated[Any, Only(remedy=_PROMPT)] = None
    enable_thinking: Annotated[Any, Only(remedy="Give it in `chat_template_kwargs`.")] = None
    include_reasoning: Annotated[Any, Only("true")] = None
    separate_reasoning: Annotated[Any, Only("true")] = None
    stream_reasoning: Annotated[Any, Only("true")] = None
    reasoning_format: Annotated[Any, Only('"auto"', '"deepseek"')] = None
    reasoning_control: Annotated[Any, Only("false")] = None
    parse_tool_calls: Annotated[Any, Only("true")] = None


class OfCompletions(OfTexts):
    """Options of other servers that completions may have."""

    add_special_tokens: Annotated[Any, Only("true", remedy="Give token ids as `prompt`, or leave it out.")] = None


TAKEN_ALONE = frozenset({*OfConversations.model_fields, *OfCompletions.model_fields})
"""Names of these options: what bodies have of them is not passed on."""
