"""The two vocabularies of a head: the target's, and the tokens that it can draft."""

from __future__ import annotations

from typing import Any

import torch

from .keys import Keys


def target_vocabulary(keys: Keys, published: dict[str, Any], conventions: dict[str, str]) -> int:
    """
    Size of the target's vocabulary: rows of the embeddings, length of `t2d`, `vocab_size` of the config, or rows of an
    lm_head without `d2t`, whichever exists first.

    Args:
        keys (`Keys`): the weights, before anything is taken out.
        published (`dict`): the config that holds `vocab_size`.
        conventions (`dict[str, str]`): gets an entry if the config says otherwise.

    Raises:
        ValueError: if none of these sources exists.
    """
    claimed = published.get("vocab_size")
    if "embed_tokens.weight" in keys:
        found, source = keys.shape("embed_tokens.weight")[0], "`embed_tokens.weight` has as many rows"
    elif "t2d" in keys:
        found, source = keys.shape("t2d", 1)[0], "`t2d` has as many entries"
    elif claimed is not None:
        if isinstance(claimed, bool) or not isinstance(claimed, int) or claimed < 1:
            raise ValueError(f"{keys.name}: `vocab_size`={claimed!r} in config.json must be a positive whole number.")
        return claimed
    elif "lm_head.weight" in keys and "d2t" not in keys:
        found, source = keys.shape("lm_head.weight")[0], "`lm_head.weight` has as many rows"
    else:
        raise ValueError(
            f"{keys.name}: `vocab_size` is missing in config.json, and no tensor tells the size of the target's "
            "vocabulary. Add it."
        )
    if claimed != found:
        conventions["vocab_size"] = f"{found}: {source}, although config.json says {claimed}"
    return found


def draft_vocabulary(keys: Keys, vocab_size: int, rows: str = "lm_head.weight") -> int | None:
    """
    The size of the draft vocabulary, None if it is the target's vocabulary. Checks `d2t` (offsets: target id = i +
    d2t[i]), and drops `t2d`, which repeats it.

    Args:
        keys (`Keys`): the weights.
        vocab_size (`int`): size of the target's vocabulary.
        rows (`str`, *optional*): the matrix that has a row for every draft token, or `d2t` itself.

    Raises:
        ValueError: if a draft token's target token is outside the vocabulary or not what `t2d` says.
    """
    num_tokens = keys.shape(rows, 1 if rows == "d2t" else 2)[0]
    t2d = keys.drop("t2d")
    if "d2t" not in keys:
        if num_tokens != vocab_size:
            raise ValueError(
                f"{keys.name}: `{rows}` has {num_tokens} rows and the vocabulary {vocab_size} tokens, but "
                "there is no `d2t` to map them."
            )
        return None
    target_ids = _target_ids(keys, num_tokens, vocab_size, rows)
    if t2d is not None:
        named = t2d.bool().nonzero()[:, 0]
        if not torch.equal(named, target_ids.sort().values):
            raise ValueError(
                f"{keys.name}: `t2d` and `d2t` name different target tokens ({len(named)} and {num_tokens}). One of "
                "them is damaged."
            )
    if num_tokens == vocab_size and not keys.weights["d2t"].any():
        keys.drop("d2t")  # every draft token is the target token of that number
        return None
    return num_tokens


def _target_ids(keys: Keys, num_tokens: int, vocab_size: int, rows: str) -> torch.Tensor:
    d2t = keys.weights["d2t"]
    if tuple(d2t.shape) != (num_tokens,):
        raise ValueError(f"{keys.name}: `d2t` has shape {tuple(d2t.shape)}, but `{rows}` has {num_tokens} rows.")
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(f"{keys.name}: `d2t` must hold whole numbers, but is of dtype {d2t.dtype}.")
    d2t = keys.weights["d2t"] = d2t.long()
    target_ids = torch.arange(num_tokens, device=d2t.device) + d2t
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if outside.any():
        wrong = int(outside.nonzero()[0])
        raise ValueError(
            f"{keys.name}: `d2t` maps draft token {wrong} to {int(target_ids[wrong])}, outside the vocabulary of "
            f"{vocab_size} tokens. It must hold offsets: target id = i + d2t[i]."
        )
    values, counts = target_ids.unique(return_counts=True)
    if len(values) != num_tokens:
        raise ValueError(
            f"{keys.name}: `d2t` maps several draft tokens to target token {int(values[counts.argmax()])}. It must "
            "hold offsets: target id = i + d2t[i]."
        )
    return target_ids
