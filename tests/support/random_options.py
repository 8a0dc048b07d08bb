"""Random `generation_config`s: names of the typed table and others, with values that fit, and values that do not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from hf_specdec.serving.requests.options import GenerationOptions

from .models import VOCAB


NAMES = [field.alias or name for name, field in GenerationOptions.model_fields.items()]
STRANGE_NAMES = [
    *("temprature", "topk", "Temperature", "max_tokens", "", " ", "a" * 300, "ü", "stop", "config"),
    *(
        "__dict__",
        "__class__",
        "__init__",
        "_eos_token_tensor",
        "_original_object_hash",
        "validate",
        "to_dict",
        "self",
    ),
]


def random_options(random_: random.Random) -> dict[str, Any]:
    """One to four options."""
    return dict(_option(random_) for _ in range(random_.choice([1, 1, 1, 2, 2, 3, 4])))


def _option(random_: random.Random) -> tuple[str, Any]:
    if random_.random() < 0.08:
        return random_.choice(STRANGE_NAMES), value(random_)
    name = random_.choice(NAMES)
    fits = _FITTING.get(name)
    return name, value(random_) if fits is None or random_.random() < 0.5 else fits(random_)


def value(random_: random.Random, depth: int = 0) -> Any:
    """Any value, most of which fit no option."""
    kinds: list[Callable[[], Any]] = [
        lambda: random_.choice([True, False, None, "true", "", "a", "[(0,)]", "auto", "x" * 500, "\u00e9\U0001f333"]),
        lambda: random_.choice([math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e308, -1e308, 5e-324, -0.0]),
        lambda: random_.choice([0, 1, -1, 2, 3, VOCAB - 1, VOCAB, 2**31, 2**63, 2**64, -(2**63), 10**9, 10**30]),
        lambda: random_.uniform(-2, 2),
        lambda: random_.choice([{}, [], [[]], [{}], [[], []], [[[]], 1.0], [[[1], math.nan]], [math.nan], [None]]),
        lambda: [value(random_, depth + 1) for _ in range(random_.randrange(4))],
        lambda: {random_.choice(["a", "__dict__", "bias", "1"]): value(random_, depth + 1) for _ in range(2)},
        lambda: _nested(random_.choice([1, 5, 60, 500]), random_.random() < 0.5),
    ]
    return random_.choice(kinds[: 5 if depth > 3 else None])()


def _nested(depth: int, as_objects: bool) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"a": found} if as_objects else [found]
    return found


def token(random_: random.Random) -> int:
    return random_.randrange(VOCAB)


def tokens(random_: random.Random) -> list[int]:
    return [token(random_) for _ in range(random_.randrange(1, 5))]


def _one_of(*values: Any) -> Callable[[random.Random], Any]:
    return lambda random_: random_.choice(values)


def _probability(random_: random.Random) -> float:
    return random_.choice([0, 1, 1.0, 1e-9, random_.random(), random_.random()])


def _penalty(random_: random.Random) -> float:
    return random_.choice([1e-30, 1e-3, 0.5, 1, 1.5, 100.0, 1e30, 3e38])


_flag, _none = _one_of(True, False, None), _one_of(None)
_lengths, _ngrams = _one_of(1, 2, 5, 20, 700, 2**31 - 1), _one_of(0, 1, 2, 3, 64)
_FITTING: dict[str, Callable[[random.Random], Any]] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "min_new_tokens", "min_length", "top_k"), _lengths),
    **dict.fromkeys(
        ("do_sample", "remove_invalid_values", "renormalize_logits", "use_cache", "disable_compile"), _flag
    ),
    **dict.fromkeys(("top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), _probability),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "temperature"), _penalty),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), _ngrams),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "eos_token_id"), tokens),
    **dict.fromkeys(("forced_bos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"), token),
    "max_time": _one_of(1e-9, 0.01, 5, 1e9),
    "stop_strings": _one_of("a", ["a", "bc"], "zz"),
    "seed": _one_of(0, 5, -1, 2**63 - 1),
    "bad_words_ids": lambda random_: [tokens(random_) for _ in range(random_.randrange(1, 4))],
    "sequence_bias": lambda random_: [[tokens(random_), random_.choice([-100, 1e30, 3e38, -3e38, 0.5])]],
    "exponential_decay_length_penalty": lambda random_: [random_.randrange(5), random_.choice([1.1, 0.5, 10])],
    "guidance_scale": _one_of(1, 1.5, 0.0, -2.0),
    "watermarking_config": lambda random_: {
        "seeding_scheme": random_.choice(["lefthash", "selfhash"]),
        "context_width": random_.choice([1, 2, 64]),
        "bias": random_.choice([2, -2.0, 1e30]),
        "hashing_key": random_.choice([1, 15485863, 2**31 - 1]),
        "greenlist_ratio": random_.choice([0, 0.25, 1]),
    },
    "tree": _one_of("auto", "[(0,), (1,)]", "chain:3", [[0], [0, 0]], "dynamic:3,2,4", "chain:1024"),
}


def is_nonsense(name: str, given: Any) -> bool:
    """Whether no server should serve an option with this value, whatever its typed table says."""
    if name not in NAMES or not _is_finite(given):
        return True
    if given is None:
        return False
    if name in _FLAGS:
        return not isinstance(given, bool)
    if name in _NUMBERS:
        return isinstance(given, bool) or not isinstance(given, (int, float)) or abs(given) > 2**63
    if name in _SEQUENCES:
        return not isinstance(given, list) or not given
    return False


def _is_finite(given: Any) -> bool:
    left = [given]
    while left:
        one = left.pop()
        if isinstance(one, float) and not math.isfinite(one) or isinstance(one, int) and abs(one) > 10**100:
            return False
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return True


_FLAGS = {name for name, fits in _FITTING.items() if fits is _flag}
_NUMBERS = {
    *(name for name, fits in _FITTING.items() if fits in (_lengths, _ngrams, _probability, token)),
    *("max_time", "seed", "num_beams", "num_return_sequences", "num_beam_groups"),
}
_SEQUENCES = {"suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"}
