"""The doctor tries both positions of an assistant of Gemma 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gemma import logits_from_scratch, make_target, write_assistant

from hf_specdec import GemmaAssistant
from hf_specdec.doctor import diagnose, examination
from hf_specdec.doctor.along_text import logits_along
from hf_specdec.doctor.measuring import ReadText, Text


def a_text() -> Text:
    """Longer than the sliding window."""
    ids = torch.randint(3, 60, (18,), generator=torch.Generator().manual_seed(1))
    ids = make_target().generate(ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=14)[0]
    return Text(ids, 18)


@pytest.mark.parametrize("position_of_feature", [False, True])
def test_chains_along_a_text(position_of_feature: bool, tmp_path: Path) -> None:
    """Those of the text from scratch."""
    target, depth = make_target(), 3
    options = {"position_of_feature": position_of_feature}
    assistant = GemmaAssistant.from_pretrained(write_assistant(tmp_path), **options).eval()
    read = ReadText.of(a_text(), [assistant], target)
    ids, before = read.text.ids.tolist(), int(position_of_feature)
    with torch.no_grad():
        steps = [logits for logits, _ in logits_along(assistant, read.rows(assistant, target, depth))]
    assert len(steps) == depth and len(steps[0]) == len(ids) - 18 - depth
    for row in (0, 4, 10):
        for step, logits in enumerate(steps):
            text, path = ids[: 19 + row], ids[19 + row : 19 + row + step]
            expected = logits_from_scratch(target, assistant, text, path, before)
            torch.testing.assert_close(logits[row], expected, atol=2e-3, rtol=2e-3)


def test_both_positions_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "write", lambda *args: a_text())
    diagnosis = diagnose(make_target(), None, str(write_assistant(tmp_path)), prompts=["one"], depth=2)  # type: ignore[arg-type]
    assert [one.name for one in diagnosis.agreements] == ["as read", "position_of_feature=True"]
    assert diagnosis.agreements[0].log_prob != diagnosis.agreements[1].log_prob
    assert diagnosis.keys["used"] and diagnosis.fix.startswith("`GemmaAssistant.from_pretrained")
