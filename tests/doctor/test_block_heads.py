"""The doctor on block heads: every usual misreading of every kind is found, and good heads are left alone."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from block.test_conversion import WINDOWS, new_head
from support.blocks import ALL, Blocks, block_head, shared_head
from support.eagle import publish, published
from support.goldens import trained_prompts, trained_target, trained_tokenizer

from hf_specdec import BlockHead
from hf_specdec.doctor import Diagnosis, diagnose
from hf_specdec.doctor.along_text import block_logits
from hf_specdec.doctor.examination import agreements_on
from hf_specdec.doctor.mask_tokens import likely_mask_token
from hf_specdec.doctor.measuring import ReadText, Text, log_probs_of, write
from hf_specdec.doctor.readings import readings, reread


PROMPTS = tuple(trained_tokenizer().decode(ids) for ids in trained_prompts()["prompts"][:6])


@lru_cache
def texts() -> list[Text]:
    return [write(trained_target(), trained_tokenizer(), prompt, 48) for prompt in PROMPTS]


def diagnosis_of(head: BlockHead, num_texts: int = 6, most_changes: int = 1) -> Diagnosis:
    """What `diagnose` finds without the files: as it does, on texts that all tests share."""
    agreements = agreements_on(head, trained_target(), texts()[:num_texts], None, lambda line: None, most_changes)
    return Diagnosis("head", "target", "format", head.config, {}, {}, agreements)


@lru_cache
def as_published(golden: str, num_texts: int = 6) -> Diagnosis:
    return diagnosis_of(shared_head(golden), num_texts, most_changes=3)


@pytest.mark.parametrize("golden", ALL)
@pytest.mark.some_cases(2)
def test_good_heads(golden: str) -> None:
    diagnosis = as_published(golden)
    assert diagnosis.is_good and "fits as it is read" in diagnosis.verdict
    assert {agreement.num_changes for agreement in diagnosis.agreements} == {0, 1}  # examined once
    best = diagnosis.best
    assert all(best.log_prob >= other.log_prob for other in diagnosis.agreements if not other.name.startswith("the"))
    tried = set().union(*(agreement.changes for agreement in diagnosis.agreements))
    rows = {"norm_before_residual"} if golden == "peagle" else {"anchor_first", "causal"}
    assert {"aux_layer_ids", "rope_theta", *rows} <= tried


def shifted(golden: str, step: int) -> dict[str, Any]:
    return {"aux_layer_ids": [layer + step for layer in block_head(golden).config.aux_layer_ids]}


def misreadings() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for golden in ALL:
        found += [(golden, shifted(golden, 1)), (golden, {"mask_token_id": 14}), (golden, {"rope_theta": 1e6})]
        if golden != "peagle":
            config = block_head(golden).config
            found += [(golden, {"anchor_first": not config.anchor_first}), (golden, {"causal": not config.causal})]
    return [*found, ("dflash", shifted("dflash", -1)), ("peagle", {"norm_before_residual": True})]


@pytest.mark.parametrize(("golden", "wrong"), misreadings(), ids=str)
@pytest.mark.some_cases(2)
def test_misread_heads(golden: str, wrong: dict[str, Any]) -> None:
    """What is recommended is the right reading, although some mistakes cost hardly any token."""
    right = block_head(golden).config
    (field,) = wrong
    fix = 10_000.0 if field == "rope_theta" else getattr(right, field)
    num_texts = 6 if field == "causal" else 2  # which shows in the probabilities alone
    diagnosis = diagnosis_of(block_head(golden, **wrong), num_texts)
    assert not diagnosis.is_good and "misread" in diagnosis.verdict
    assert diagnosis.best.changes == {field: fix}
    assert diagnosis.fix == f"`BlockHead.from_pretrained('head', {field}={fix!r})`"
    assert diagnosis.best.log_prob == pytest.approx(as_published(golden, num_texts).as_read.log_prob, abs=1e-6)


TWO_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {"anchor_first": True, **shifted("dflash", 1)}),
    ("dspark", {"anchor_first": False, "rope_theta": 1e6}),
    ("jetspec", {"mask_token_id": 14, **shifted("jetspec", 1)}),
    ("dflash2", {"anchor_first": True, "mask_token_id": 14}),
]


@pytest.mark.parametrize(
    ("golden", "wrong"),
    [pytest.param(*case, marks=() if case[0] in ("dflash", "dspark") else pytest.mark.slow) for case in TWO_MISTAKES],
    ids=str,
)
@pytest.mark.some_cases(1)
def test_one_mistake_does_not_hide_another(golden: str, wrong: dict[str, Any]) -> None:
    right, head = block_head(golden).config, block_head(golden, **wrong)
    diagnosis = diagnosis_of(head, num_texts=2, most_changes=2)
    fixes = {field: 10_000.0 if field == "rope_theta" else getattr(right, field) for field in wrong}
    assert diagnosis.best.changes == fixes and not diagnosis.is_good
    assert all(f"{field}={fix!r}" in diagnosis.fix for field, fix in fixes.items())
    one_change = [one for one in diagnosis.agreements if one.num_changes < 2]
    assert max(one.acceptance_length for one in one_change) < diagnosis.best.acceptance_length
    assert len(diagnosis.agreements) < 40


@pytest.mark.slow
def test_from_files(tmp_path: Path) -> None:
    """The whole examination: it drafts under the best reading, and the recommended call reads the head so."""
    config, weights = published("dspark")
    folder = publish(tmp_path, config | {"target_layer_ids": [2, 4, 6]}, weights)
    diagnosis = diagnose(
        trained_target(), trained_tokenizer(), str(folder), prompts=PROMPTS[:3], max_new_tokens=40, depth=4
    )
    assert diagnosis.best.changes == {"aux_layer_ids": [2, 4, 6]} and len(diagnosis.best.top1) == 4
    assert diagnosis.tree_acceptance_length > 2.5 and diagnosis.keys["used"]
    assert "aux_layer_ids" in diagnosis.conventions
    head = eval(diagnosis.fix.strip("`"), {"BlockHead": BlockHead})
    assert head.config.aux_layer_ids == [2, 4, 6]


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("golden", ALL)
@pytest.mark.some_cases(2)
def test_logits_along_a_text_are_those_of_drafting(golden: str) -> None:
    """Blocks after all tokens at once are blocks one by one, each on context of its own."""
    head, target, text = shared_head(golden), trained_target(), texts()[0]
    depth = 4
    read = ReadText.of(text, [head], target)
    rows = read.rows(head, target, depth)
    with torch.no_grad():
        found = torch.stack([drafted for drafted, _ in block_logits(head, rows)], dim=1)
    blocks = Blocks(head, text.ids[None])
    for row, root in list(enumerate(rows.roots.tolist()))[::9]:
        states, base = blocks.after(root)
        carried = None
        for step in range(depth):
            here, parent = states[None, step : step + 1], text.ids[None, root + step : root + step + 1]
            logits, carried = head.conditional_logits(base[None, step : step + 1], here, parent, carried)
            torch.testing.assert_close(found[row, step], logits[0, 0], atol=1e-4, rtol=1e-4)


def test_windows_count_from_the_block(tmp_path: Path) -> None:
    """A context that fills the right end of its slots, whatever its length."""
    config, weights = published("dflash")
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    head = block_head(publish(tmp_path, config, weights))
    names = [name for name, _ in readings(head.config, trained_target().config)]
    assert "window_is_causal=False" in names
    text = texts()[0]
    rows = ReadText.of(text, [head], trained_target()).rows(head, trained_target(), 4)
    with torch.no_grad():
        found = torch.stack([drafted for drafted, _ in block_logits(head, rows)], dim=1)
    for row in (0, len(found) - 1):
        states, base = Blocks(head, text.ids[None]).after(int(rows.roots[row]))
        torch.testing.assert_close(found[row], base[:4], atol=1e-4, rtol=1e-4)


def test_log_probabilities_of_a_draft_vocabulary() -> None:
    """Tokens outside of it do not count."""
    head = new_head(draft_vocab_size=2, has_lm_head=True)
    head.d2t.copy_(torch.tensor([4, 8]))  # tokens 4 and 9
    found = log_probs_of(head, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, -60.0]]), torch.tensor([4, 5, 9]))
    assert found[0] == pytest.approx(-0.3133, abs=1e-4) and found[1].isnan() and found[2] == -15


# --------------------------------------------------------------------------------------------------- readings, weights


def test_readings() -> None:
    target = trained_target().config
    names = {name for name, _ in readings(new_head(WINDOWS, rope_parameters=None).config, target)}
    assert {"row 0, the anchor's, drafts first", "a causal block", "window_is_causal=False"} <= names
    causal = {name for name, _ in readings(new_head(WINDOWS, causal=True).config, target)}
    assert "all rows of a block see one another" in causal and "window_is_causal=False" not in causal


@pytest.mark.parametrize("golden", ["dflash", "dspark", "dflash2", "peagle"])
@pytest.mark.some_cases(2)
def test_rereading(golden: str) -> None:
    head = shared_head(golden)
    for _, changes in readings(head.config, trained_target().config):
        other, expected = reread(head, changes), block_head(golden, **changes)
        for key, parameter in other.named_parameters():
            assert head.get_parameter(key).data_ptr() == parameter.data_ptr()
        inputs = {"inputs_embeds": torch.randn(1, 7, 64), "logits_to_keep": None}
        with torch.no_grad():
            assert torch.equal(other(**inputs).hidden_states, expected(**inputs).hidden_states)


@pytest.mark.parametrize("wrong", [2, 300])
def test_mask_tokens(wrong: int) -> None:
    """Found from wherever the search begins, and nothing is left behind."""
    head = block_head("jetspec", mask_token_id=wrong)
    read = ReadText.of(texts()[1], [head], trained_target())
    assert likely_mask_token(head, trained_target(), read, 5) == 27
    assert all(parameter.grad is None for parameter in (*head.parameters(), *trained_target().parameters()))
