"""What each route needs, the kinds of its fields, and fields that are not supported."""

from __future__ import annotations

from typing import Any

from .values import LONG, NAN


USER = {"role": "user", "content": "abc"}
CHAT, COMPLETION, RESPONSE, LOAD = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/load_model"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETION: {"prompt": "abc"},
    RESPONSE: {"input": "abc"},
    LOAD: {"model": "some/model"},
    TOKENIZE: {"prompt": "abc"},
    DETOKENIZE: {"tokens": [1]},
}
"""What each route needs."""

_SWITCHED_OFF = {
    **dict.fromkeys(("repeat_last_n", "dry_base", "dry_allowed_length", "dry_penalty_last_n"), "number"),
    **dict.fromkeys(("xtc_threshold", "mirostat_tau", "mirostat_eta", "dynatemp_exponent"), "number"),
    **dict.fromkeys(("n_keep", "n_discard"), "number"),
    **dict.fromkeys(("spaces_between_special_tokens", "backend_sampling"), "boolean"),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern", "session_id"), "text"),
    "dry_sequence_breakers": "breakers",
    "truncation_side": "verbosity",
}
"""Options of other servers that have no effect, whatever they are."""

_OF_ALL: dict[str, str] = {
    "model": "model",
    "temperature": "temperature",
    "top_p": "probability",
    "seed": "seed",
    "stream": "boolean",
    "generation_config": "options",
    "stream_options": "stream options",
    "structured_outputs": "structured outputs",
    "user": "text",
    "top_k": "top-k",
    "min_p": "probability",
    "repetition_penalty": "positive",
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "penalty"),
    "min_tokens": "count",
    "ignore_eos": "boolean",
    "stop_token_ids": "stop tokens",
    "priority": "priority",
    "tree": "tree",
} | _SWITCHED_OFF
_OF_CONVERSATIONS = {
    "chat_template_kwargs": "template variables",
    "tool_choice": "choice without tools",
    "tools": "list",
    "parallel_tool_calls": "boolean",
    "top_logprobs": "best tokens",
    "metadata": "object of strings",
    "store": "boolean",
    "prompt_cache_options": "object",
    **dict.fromkeys(("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "text"),
}
_OF_TEXTS = {
    **dict.fromkeys(("max_tokens", "n_predict"), "most new"),
    "stop": "stop",
    "n": "choices",
    "best_of": "other choices",
    "logit_bias": "bias",
    "response_format": "response format",
}
FIELDS: dict[str, dict[str, str]] = {
    CHAT: _OF_ALL
    | _OF_CONVERSATIONS
    | _OF_TEXTS
    | {"max_completion_tokens": "most new", "verbosity": "verbosity", "messages": "list", "logprobs": "boolean"}
    | {"reasoning_effort": "verbosity"},
    COMPLETION: _OF_ALL | _OF_TEXTS | {"prompt": "prompt", "logprobs": "best tokens"},
    RESPONSE: _OF_ALL
    | _OF_CONVERSATIONS
    | {
        "input": "input",
        "instructions": "text",
        "max_output_tokens": "most new",
        "text": "text options",
        "include": "included",
        "reasoning": "reasoning",
        "image": "object",
        "access_programs": "object",
    },
    LOAD: {"model": "model"},
    TOKENIZE: {
        "model": "model",
        "prompt": "text",
        **dict.fromkeys(("messages", "tools"), "list"),
        "chat_template_kwargs": "template variables",
        **dict.fromkeys(("add_special_tokens", "return_token_strs"), "boolean"),
    },
    DETOKENIZE: {"model": "model", "tokens": "stop tokens"},
}
"""The kinds of the fields that are served, by route."""

_TRUE = [True, 1, 0, "false", [1]]
_ANYTHING = [5, "a", {"a": 1}, [1], True]
_SWITCHES: dict[str, list[Any]] = {
    **dict.fromkeys(("skip_special_tokens", "detokenize", "cache_prompt"), [False, 1, "true", {}, [1]]),
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output", "no_stop_trim"), _TRUE),
    **dict.fromkeys(("post_sampling_probs", "return_token_ids", "return_tokens", "return_token_offsets"), _TRUE),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_prompt_text", "return_hidden_states"), _TRUE),
    **dict.fromkeys(("return_progress", "timings_per_token"), _TRUE),
}
_NUMBERS: dict[str, list[Any]] = {
    **dict.fromkeys(("length_penalty", "typical_p", "typ_p", "tfs_z", "repeat_penalty"), [0.5, 2, "1", True, NAN]),
    **dict.fromkeys(("n_cmpl", "stream_interval"), [0, 2, "1", True, [1]]),
    **dict.fromkeys(("top_a", "dry_multiplier", "xtc_probability", "dynatemp_range"), [0.5, -1, "0", False, NAN]),
    **dict.fromkeys(("mirostat", "min_keep", "t_max_predict_ms", "n_indent", "n_probs"), [1, -1, "0", False, [0]]),
    **dict.fromkeys(("top_n_sigma", "n_cache_reuse", "id_slot"), [1, 0.5, "0", False, [0]]),
    **dict.fromkeys(("thinking_token_budget", "sse_ping_interval"), [0, 5, "-1", True, [-1]]),
}
_OTHERS: dict[str, list[Any]] = {
    **dict.fromkeys(("samplers", "logits_processors", "bad_words", "custom_logit_processor"), _ANYTHING),
    **dict.fromkeys(("allowed_token_ids", "logprob_token_ids", "prompt_logprobs", "repetition_detection"), _ANYTHING),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), _ANYTHING),
    **dict.fromkeys(("grammar", "json_schema", "regex", "ebnf", "stop_regex", "response_fields"), _ANYTHING),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_embeds", "media_io_kwargs", "mm_processor_kwargs"), _ANYTHING),
    **dict.fromkeys(("lora", "lora_path", "cache_salt", "request_id", "rid", "vllm_xargs"), _ANYTHING),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), _ANYTHING),
}
_ELSEWHERE = _SWITCHES | _NUMBERS | _OTHERS
"""Options of other servers, with values that ask for something else than what happens anyway."""
_ELSEWHERE_OF_CONVERSATIONS: dict[str, list[Any]] = _ELSEWHERE | {
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "separate_reasoning"), [False, 1, "true", {}, [1]]),
    **dict.fromkeys(("stream_reasoning", "parse_tool_calls"), [False, 1, "true", {}, [1]]),
    **dict.fromkeys(("continue_final_message", "add_special_tokens", "echo", "reasoning_control"), _TRUE),
    **dict.fromkeys(("documents", "chat_template", "enable_thinking"), _ANYTHING),
    "reasoning_format": ["none", 5, True, {}, [1]],
}
UNSUPPORTED: dict[str, dict[str, list[Any]]] = {
    CHAT: _ELSEWHERE_OF_CONVERSATIONS
    | {
        "functions": [[{"name": "f"}], 5, "a", {"a": 1}, True],
        "function_call": [{"name": "f"}, "required", 5, [1], True],
        "modalities": [["text", "audio"], ["audio"], "text", 5, {"a": 1}],
        **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), _ANYTHING),
    },
    COMPLETION: _ELSEWHERE
    | {"echo": _TRUE, "suffix": ["a", 5, True, [1], LONG], "add_special_tokens": [False, 1, "true", {}, [1]]},
    TOKENIZE: {
        "add_generation_prompt": [False, 1, "true", {}, [1]],
        "continue_final_message": [True, 1, "false", {}, [1]],
        **dict.fromkeys(("chat_template", "media_io_kwargs", "mm_processor_kwargs"), _ANYTHING),
    },
    RESPONSE: _ELSEWHERE_OF_CONVERSATIONS
    | {
        "background": _TRUE,
        "context_management": [[{"type": "compaction"}], 5, "a", {"a": 1}, True],
        "truncation": ["auto", 5, True, {"a": 1}, [1]],
        **dict.fromkeys(("conversation", "max_tool_calls", "previous_response_id", "prompt", "moderation"), _ANYTHING),
    },
}
"""Fields that are not supported, with values that would change something."""

OPTIONS: dict[str, str] = {
    **dict.fromkeys(("max_new_tokens", "max_length"), "length"),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), "count"),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), "n-gram size"),
    **dict.fromkeys(("do_sample", "remove_invalid_values", "renormalize_logits", "use_cache"), "boolean"),
    **dict.fromkeys(("disable_compile", "_from_model_config"), "boolean"),
    **dict.fromkeys(("top_p", "min_p"), "probability"),
    **dict.fromkeys(("top_h", "typical_p"), "positive probability"),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), "cutoff"),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "max_time"), "positive"),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), "tokens"),
    **dict.fromkeys(("forced_bos_token_id", "bos_token_id", "pad_token_id"), "token"),
    **dict.fromkeys(("forced_eos_token_id", "decoder_start_token_id"), "token or tokens"),
    "temperature": "temperature",
    "seed": "seed",
    "guidance_scale": "number",
    "eos_token_id": "end",
    "stop_strings": "stop",
    "bad_words_ids": "sequences",
    "sequence_bias": "biases",
    "exponential_decay_length_penalty": "decay",
    "watermarking_config": "watermark",
    "tree": "tree",
    "transformers_version": "text",
}
"""Kinds of the options of `generate` that are served, or have no effect."""
UNSUPPORTED_OPTIONS: dict[str, list[Any]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), [2, 0, "1", True, 1.5]),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), [0.5, -1, "0", False, NAN]),
    "length_penalty": [2, 0.5, "1", True, [1]],
    "early_stopping": [True, "never", 0, [1], {"a": 1}],
    "cache_implementation": ["static", "paged", 5, True, [1]],
    "num_assistant_tokens": [5, 0, "20", True, [20]],
    "num_assistant_tokens_schedule": ["heuristic", 5, True, [1], {"a": 1}],
    "assistant_confidence_threshold": [0.5, 0, "0.4", True, NAN],
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), [5, 0, "10", True, [10]]),
    **dict.fromkeys(("assistant_early_exit", "prompt_lookup_num_tokens"), [5, -1, "0", False, [0]]),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        [True, 1, 0, "false", [1]],
    ),
    **dict.fromkeys(("is_assistant", "use_mtp", "low_memory", "token_healing"), [True, 1, 0, "false", [1]]),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "cache_config", "max_cache_len"), _ANYTHING),
    **dict.fromkeys(("compile_config", "prefill_chunk_size", "continuous_batching_config"), _ANYTHING),
    **dict.fromkeys(("speculative_config", "assistant_ensemble_weight", "max_matching_ngram_size"), _ANYTHING),
    "speculation_type": _ANYTHING,
}
"""Options that requests do not have."""
UNKNOWN = [
    *("temprature", "max_token", "Stream", "__class__", "__dict__", "_x", "", " model", LONG, "ü", "epsilon_cutoff"),
    "self",
]
"""Names of no field."""
