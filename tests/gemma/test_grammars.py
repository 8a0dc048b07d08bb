"""Assistants in whole steps of which a grammar takes nodes back: they draft from the last node that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from support.device_steps import Steps
from support.gemma import make_target, write_assistant
from support.recording import WIDE, padded_prompts
from support.tokenizer import tiny_tokenizer

from hf_specdec import GemmaAssistant, TokenTree
from hf_specdec.drafters.gemma import CapturedGemma
from hf_specdec.engine.captured import outcome
from hf_specdec.engine.captured.step import InFlightStep
from hf_specdec.trees import DraftTree


GRAMMAR = LLMatcher.grammar_from_regex("([a-m]{1,3}( (aa|bb|zz))?|[.]){3,}")


class Cuts:
    """The features from which captured steps draft, by text, and how many nodes grammars take back of their paths."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.features: dict[tuple[int, ...], torch.Tensor] = {}
        self.num_nodes = 0
        grown, constrained = CapturedGemma.grown, outcome.constrained

        def noted(draft: Any, last: torch.Tensor, *args: Any) -> DraftTree:
            values = draft.rows.lengths.tolist(), draft.rows.tail.tolist(), draft.rows.counts.tolist()
            for length, tail, count, feature in zip(*values, last.clone(), strict=True):
                self.features[(length, *tail[:count])] = feature  # the last run of a text is that after the capture
            return grown(draft, last, *args)

        def counted(request: Any, tokens: list[int], logits_at: Any) -> Any:
            found = constrained(request, tokens, logits_at)
            self.num_nodes += len(tokens) - len(found[0]) if found[0] else 0
            return found

        monkeypatch.setattr(CapturedGemma, "grown", noted)
        monkeypatch.setattr(outcome, "constrained", counted)

    @torch.no_grad()
    def furthest_from_scratch(self, target: Any, texts: list[list[int]]) -> float:
        """The largest difference to the target's last hidden state before the end of the same text, read at once."""
        furthest, compared = 0.0, 0
        for (length, *tail), feature in self.features.items():
            own = [
                text[:length] for text in texts if len(text) >= length and text[length - len(tail) : length] == tail
            ]
            if not tail or not own:  # a row of nobody
                continue
            states = [target.model(input_ids=torch.tensor([text[:-1]])).last_hidden_state[0, -1] for text in own]
            furthest, compared = max(furthest, min(float((feature - one).abs().max()) for one in states)), compared + 1
        assert compared > 10
        return furthest


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [None, "last accepted node"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["call", "in flight"])
def test_features_after_a_cut(
    in_flight: bool, mistake: str | None, steps: Steps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are those of a text that was never drafted."""
    target, assistant = make_target(), GemmaAssistant.from_pretrained(write_assistant(tmp_path)).eval()
    if mistake is not None:
        monkeypatch.setattr(InFlightStep, "keep_until", lambda *_: None)
    cuts, inputs = Cuts(monkeypatch), padded_prompts()
    options: dict[str, Any] = {"grammar": GRAMMAR, "tokenizer": tiny_tokenizer(), "max_new_tokens": 40}
    options |= {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    alone = target.generate(**inputs, **options)
    speculative: dict[str, Any] = {"assistant_model": assistant, "tree": TokenTree(WIDE)}
    if in_flight:
        prompts = [row[mask == 1].tolist() for row, mask in zip(*inputs.values(), strict=True)]
        found = target.generate_batch(prompts, **options, **speculative)
        texts = [[*one.prompt_ids, *one.generated_tokens] for one in found.values()]
    else:
        both = target.generate(**inputs, **options, **speculative)
        assert both.equal(alone)
        texts = [row[row.ne(0).nonzero()[0, 0] :].tolist() for row in both]
    assert steps.replays > 5 and cuts.num_nodes > 0
    furthest = cuts.furthest_from_scratch(target, texts)
    assert furthest < 1e-3 if mistake is None else furthest > 0.1
