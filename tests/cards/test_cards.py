"""Cards as the Hub and people read them: tables of measurements, and the card of a draft model."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from support.models import tiny_model
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import Measurement
from hf_specdec.cards import draft_model_card
from hf_specdec.cards.measurement import longest_of_each_tree, read_measurements
from hf_specdec.cards.sections import facts, measured, recipe


SAMPLED = Measurement(
    dataset="code",
    tree="drawn (4, 3, 1)",
    mean_acceptance_length=2.25,
    acceptance_per_position=(0.755, 0.5),
    temperature=1.0,
    draft_sampling="sample",
    verification="rejection",
    batch_size=8,
    dtype="bfloat16",
    hardware="one GPU",
)
TIMED = Measurement(
    dataset="chat",
    tree="its own",
    mean_acceptance_length=2.0,
    tokens_per_second=30.0,
    plain_tokens_per_second=20.0,
    dtype="float32",
    hardware="a CPU",
)


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return tiny_model(num_hidden_layers=2)


def table_rows(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_a_row_says_how_it_was_drafted_and_what_each_depth_kept() -> None:
    header, _, row = table_rows(measured([SAMPLED]))
    assert dict(zip(header, row, strict=True)) == {
        "prompts": "code",
        "tree": "drawn (4, 3, 1)",
        "temperature": "1",
        "draft sampling": "sample",
        "verification": "rejection",
        "mean acceptance length": "2.25",
        "acceptance at depth 1, 2, …": "0.76 0.50",
    }


def test_a_table_for_every_machine() -> None:
    text = measured([SAMPLED, replace(SAMPLED, dataset="chat"), TIMED])
    gpu, cpu = text.index("one GPU, bfloat16, batch size 8:"), text.index("a CPU, float32, batch size 1:")
    assert len(table_rows(text[gpu:cpu])) == 4
    header, _, row = table_rows(text[cpu:])
    assert header[-3:] == ["tokens/s", "plain tokens/s", "speed-up"] and row[-3:] == ["30.0", "20.0", "1.50"]
    assert "acceptance rate" not in text


def test_what_one_row_lacks_is_empty() -> None:
    header, _, first, second = table_rows(
        measured([SAMPLED, replace(TIMED, hardware="one GPU", dtype="bfloat16", batch_size=8)])
    )
    assert [row[header.index("speed-up")] for row in (first, second)] == ["", "1.50"]
    assert [row[header.index("verification")] for row in (first, second)] == ["rejection", ""]


def test_the_model_index_says_how_it_was_drafted() -> None:
    found = SAMPLED.eval_result()
    assert (found.metric_type, found.metric_value) == ("mean_acceptance_length", 2.25)
    assert found.metric_args == {
        "tree": "drawn (4, 3, 1)",
        "temperature": 1.0,
        "draft_sampling": "sample",
        "verification": "rejection",
    }
    assert not {"draft_sampling", "verification"} & TIMED.setting.keys()


def test_one_figure_for_each_tree() -> None:
    shorter = replace(SAMPLED, draft_sampling="greedy", verification="target", mean_acceptance_length=2.0)
    others = [replace(SAMPLED, **change) for change in ({"tree": "a"}, {"dataset": "b"}, {"temperature": 0.5})]
    assert longest_of_each_tree([shorter, SAMPLED, *others, shorter]) == [SAMPLED, *others]


def test_the_figures_beside_a_card(draft: PreTrainedModel, tmp_path: Path) -> None:
    draft_model_card(draft, "owner/target").save(tmp_path / "README.md")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    card = draft_model_card(draft, "owner/target", measurements=[SAMPLED, TIMED])
    card.save(tmp_path / "README.md")
    assert "[measurements.json](measurements.json)" in card.text
    assert read_measurements(tmp_path / "measurements.json") == [SAMPLED, TIMED]


def test_empty_sections_are_left_out() -> None:
    assert measured([]) == facts("x", {}) == recipe(None) == recipe({}) == ""


def test_the_recipe_in_words() -> None:
    rows = table_rows(recipe({"batch_tokens": 512, "held_out_top1": [0.5, 0.25]}))
    assert rows[2:] == [["batch tokens", "512"], ["held out top1", "0.5 0.25"]]


def test_a_draft_models_metadata(draft: PreTrainedModel, tmp_path) -> None:
    card = draft_model_card(draft, "owner/target", "me/draft", measurements=[SAMPLED], license="mit", tags=["mine"])
    card.save(tmp_path / "README.md")
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.library_name, data.base_model, data.license) == ("transformers", "owner/target", "mit")
    assert data.tags == ["speculative-decoding", "draft-model", "mine"]
    assert data.pipeline_tag == "text-generation"
    assert data.model_name == "draft" and len(data.eval_results) == 1
    assert f"| vocabulary | the target's {draft.config.vocab_size} tokens |" in card.text


def test_a_draft_models_usage(draft: PreTrainedModel) -> None:
    code = draft_model_card(draft, "owner/target", "me/draft").text.split("```python\n")[1].split("```")[0]
    (written,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Dict) and len(node.keys) > 2]
    options = {key.value: value for key, value in zip(written.keys, written.values, strict=True)}
    assert options["assistant_model"].id == "draft"
    hf_specdec.TokenTree.parse(options["tree"].value)
    assert '"me/draft"' in code and '"owner/target"' in code


def test_a_draft_models_recipe_and_a_folder_as_target(tmp_path) -> None:
    draft = tiny_model(num_hidden_layers=1)
    draft.config.recipe = {"steps": 7}
    text = draft_model_card(draft, str(tmp_path)).text
    assert "| steps | 7 |" in text and str(tmp_path) not in text and "its target model" in text
