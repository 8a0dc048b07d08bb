"""The doctor finds what was misread, says how to read it, and leaves good heads alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from support.heads import tiny_head
from support.models import tiny_model
from typer.testing import CliRunner

from hf_specdec import EagleHead
from hf_specdec.cli import build_app
from hf_specdec.eagle.doctor import Diagnosis, diagnose


GOLDENS = TINY_TARGET.parent
PROMPTS = tuple(trained_tokenizer().decode(ids) for ids in trained_prompts()["prompts"][:5])


def examine(folder: Path, **options: Any) -> Diagnosis:
    return diagnose(trained_target(), trained_tokenizer(), str(folder), prompts=PROMPTS, **options)


def misread(folder: Path, source: str, **changes: Any) -> Path:
    """A head in our own format, whose config says something else than the head was trained with."""
    head = EagleHead.from_pretrained(GOLDENS / source, dtype=torch.float32)
    for name, value in changes.items():
        setattr(head.config, name, value)
    head.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name", ["safeailab_eagle1", "safeailab_eagle3", "speculators_eagle3", "specforge_eagle3", "modelopt_eagle3"]
)
def test_good_heads(name: str) -> None:
    diagnosis = examine(GOLDENS / name)
    assert diagnosis.is_good
    assert "fits as it is read" in diagnosis.verdict
    assert diagnosis.format.startswith(name.split("_")[0])
    assert len(diagnosis.as_read.top1) == 5
    assert diagnosis.tree_acceptance_length > 2
    assert diagnosis.keys["used"]


def test_agreement_is_that_of_real_chains() -> None:
    """The length of simulated chains, started behind every token, against those of `generate`."""
    diagnosis = examine(GOLDENS / "speculators_eagle3", depth=4)
    tokens = steps = 0
    for prompt in PROMPTS:
        ids = trained_tokenizer()(prompt, return_tensors="pt")["input_ids"]
        head = EagleHead.from_pretrained(GOLDENS / "speculators_eagle3")
        options = {"do_sample": False, "max_new_tokens": 96, "return_dict_in_generate": True}
        mask = torch.ones_like(ids)
        out = trained_target().generate(
            ids, attention_mask=mask, assistant_model=head, tree="[(0,), (0,0), (0,0,0), (0,0,0,0)]", **options
        )
        tokens += out.speculation.num_accepted_tokens + out.speculation.num_drafts
        steps += out.speculation.num_drafts
    assert abs(diagnosis.as_read.acceptance_length - tokens / steps) < 0.45


@pytest.mark.parametrize(
    "source, wrong, fix",
    [
        (
            "modelopt_eagle3",
            {"aux_layer_ids": [1, 3, 4], "aux_layer_convention": "boundaries"},
            "aux_layer_ids=[2, 4, 5]",
        ),
        ("speculators_eagle3", {"aux_layer_ids": [3, 5, 6]}, "aux_layer_ids=[2, 4, 5]"),
        ("speculators_eagle3", {"norm_before_residual": False}, "norm_before_residual=True"),
    ],
)
def test_misread_heads(source: str, wrong: dict[str, Any], fix: str, tmp_path: Path) -> None:
    """The fix is found, and loading the head as it says makes the head good."""
    folder = misread(tmp_path / "head", source, **wrong)
    diagnosis = examine(folder)
    assert not diagnosis.is_good
    assert "misread" in diagnosis.verdict and fix in diagnosis.fix
    again = diagnose(trained_target(), trained_tokenizer(), str(folder), prompts=PROMPTS, **diagnosis.best.changes)
    assert again.is_good
    assert again.as_read.acceptance_length == pytest.approx(diagnosis.best.acceptance_length)


def test_a_head_that_was_never_trained(tmp_path: Path) -> None:
    tiny_head(trained_target(), layers={"head_dim": 16}).save_pretrained(tmp_path)
    diagnosis = examine(tmp_path)
    assert not diagnosis.is_good
    assert "agrees too little" in diagnosis.verdict and "hf-specdec train" in diagnosis.verdict


def test_a_head_for_another_target(tmp_path: Path) -> None:
    tiny_head(tiny_model("llama")).save_pretrained(tmp_path)
    diagnosis = examine(tmp_path)
    assert diagnosis.problem is not None and "vocabulary of 61" in diagnosis.verdict
    assert diagnosis.agreements == []


def test_answers_that_are_too_short() -> None:
    with pytest.raises(ValueError, match="max_new_tokens.*too short"):
        examine(GOLDENS / "safeailab_eagle3", max_new_tokens=4)


# ------------------------------------------------------------------------------------------------- as it is called


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(build_app(), ["doctor", *map(str, arguments), "--max-new-tokens", "32"])


def test_command_line(tmp_path: Path) -> None:
    result = call(TINY_TARGET, GOLDENS / "speculators_eagle3")
    assert result.exit_code == 0, result.output
    assert "verdict: The head fits" in result.output and "top-1" in result.output
    folder = misread(tmp_path / "head", "speculators_eagle3", norm_before_residual=False)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(PROMPTS))
    result = call(TINY_TARGET, folder, "--text", prompts)
    assert result.exit_code == 1
    assert "verdict: The head is misread" in result.output and "norm_before_residual=True" in result.output


def test_command_line_without_a_head(tmp_path: Path) -> None:
    result = call(TINY_TARGET, tmp_path)
    assert result.exit_code == 2
    assert "config.json" in result.output
