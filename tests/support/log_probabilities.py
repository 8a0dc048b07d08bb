"""Log-probabilities of a text, by plain `generate`."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.batching import SpeculativeGenerationOutput


_FOUND: WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()
"""Logits and processed scores of a model by text and options: many tests ask for the same texts of one target."""


@torch.no_grad()
def of_plain(model: PreTrainedModel, prompt: list[int], text: list[int], mode: str, options: Any) -> torch.Tensor:
    """Log-probabilities in every place of a text, `[tokens, vocab]`: plain `generate` is asked for the next token."""
    call = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 1}
    call |= {name: value for name, value in options.items() if name != "seed"}
    known, found = _FOUND.setdefault(model, {}), []
    for end in range(len(text)):
        tokens = prompt + text[:end]
        key = tuple(tokens), repr(sorted(call.items()))
        if key not in known:
            ids = torch.tensor([tokens], device=model.device)
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **call)
            known[key] = output.logits[0][0], output.scores[0][0]
        found.append(known[key][mode != "raw"])
    return torch.stack(found).cpu().log_softmax(dim=-1)


def check(
    model: PreTrainedModel,
    output: SpeculativeGenerationOutput,
    best: int | None,
    mode: str | None,
    options: Any,
    tolerance: float = 1e-5,
) -> None:
    """Asserts that a result has the log-probabilities of plain `generate`, if its request has asked for any."""
    text = output.generated_tokens
    if best is None:
        assert output.logprobs == [] and output.top_logprobs == []
        return
    expected = of_plain(model, output.prompt_ids, text, mode or "processed", options)
    own = expected.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert output.logprobs == pytest.approx(own.tolist(), abs=tolerance)
    assert len(output.top_logprobs) == (len(text) if best else 0)
    for pairs, logs in zip(output.top_logprobs, expected, strict=False):
        values, possible = [value for _, value in pairs], min(best, int(logs.isfinite().sum()))
        assert values == pytest.approx(logs.topk(possible).values.tolist(), abs=tolerance)
        assert values == pytest.approx([float(logs[token]) for token, _ in pairs], abs=tolerance)
        assert len({token for token, _ in pairs}) == possible
