"""The generated model card: metadata that the Hub reads, and text for people."""

import ast

import pytest
import yaml
from huggingface_hub import ModelCard
from support.eagle import EAGLE_1, GOLDENS

import hf_specdec
from hf_specdec import EagleHead, Measurement


MEASURED = Measurement(
    dataset="MT-bench",
    tree="[(0,), (1,), (0, 0)]",
    mean_acceptance_length=3.25,
    draft_acceptance_rate=0.41,
    tokens_per_second=300.0,
    plain_tokens_per_second=120.0,
    hardware="one H100",
    dtype="bfloat16",
)


def head(golden="speculators_eagle3", **options):
    return EagleHead.from_pretrained(GOLDENS / golden, **options)


def test_metadata():
    data = head(target_name="owner/target").model_card("me/head", license="apache-2.0", tags=["mine"]).data
    assert data.library_name == "hf_specdec"
    assert data.base_model == "owner/target"
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["speculative-decoding", "eagle3", "mine"]
    assert data.license == "apache-2.0"
    assert head(EAGLE_1).model_card().data.tags == ["speculative-decoding", "eagle"]


def test_measurements_are_in_the_model_index():
    card = head().model_card("me/head", measurements=[MEASURED])
    index = yaml.safe_load(card.content.split("---")[1])["model-index"]
    assert [entry["name"] for entry in index] == ["head"]
    (result,) = index[0]["results"]
    assert result["task"]["type"] == "text-generation"
    assert result["dataset"] == {"type": "mt-bench", "name": "MT-bench"}
    (metric,) = result["metrics"]
    assert (metric["type"], metric["value"]) == ("mean_acceptance_length", 3.25)
    assert metric["args"] == MEASURED.setting
    assert "one H100, bfloat16, batch size 1:" in card.text
    assert "| MT-bench | [(0,), (1,), (0, 0)] | 0 | 3.25 | 0.410 | 300.0 | 120.0 | 2.50 |" in card.text


def test_reads_back_as_written(tmp_path):
    written = head(target_name="owner/target").model_card("me/head", measurements=[MEASURED], language="en")
    written.save(tmp_path / "README.md")
    read = ModelCard.load(tmp_path / "README.md")
    assert read.data.to_dict() == written.data.to_dict()
    assert read.text.strip() == written.text.strip()


def test_without_measurements_there_is_no_table():
    card = head().model_card()
    assert "## Measured" not in card.text
    assert card.data.eval_results is None


def test_from_the_metrics_of_a_call():
    metrics = hf_specdec.SpeculationMetrics(
        num_drafts=10, num_draft_tokens=30, num_accepted_tokens=15, num_accepted_per_position=[8, 7]
    )
    measurement = Measurement.from_metrics(metrics, dataset="a text", tree="[(0,), (0, 0)]")
    assert (measurement.mean_acceptance_length, measurement.draft_acceptance_rate) == (2.5, 0.5)
    assert measurement.acceptance_per_position == (0.8, 0.7)
    assert measurement.speed_up is None
    assert measurement.eval_result().metric_value == 2.5


@pytest.mark.parametrize("name", ["/home/someone/llama", "./target", "a b", "..", "x/y/z", None])
def test_folders_are_not_published_as_base_model(name):
    card = head(target_name=name).model_card("me/head")
    assert card.data.base_model is None
    assert name is None or name not in card.text
    assert "its target model" in card.text


def test_a_folder_that_exists_is_not_published(tmp_path, monkeypatch):
    (tmp_path / "owner" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert head(target_name="owner/target").model_card().data.base_model is None


def test_facts_and_recipe():
    text = head(recipe={"dataset": "ShareGPT", "learning_rate": 1e-4}, default_tree=[[0]]).model_card().text
    assert "| drafts | 256 of 512 tokens |" in text
    assert "| reads | the target's hidden states 2, L/2 and L−3 of L layers |" in text
    assert "| learning rate | 0.0001 |" in text
    assert "| default tree | `[[0]]` |" in text
    assert "- `embed_tokens`: the target's" in text
    assert "its final norm |" in head(EAGLE_1).model_card().text


def test_the_usage_is_python_with_our_names():
    text = head(target_name="owner/target").model_card("me/head").text
    code = text.split("```python\n")[1].split("```")[0]
    tree = ast.parse(code)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_ours(node)}
    assert used == {"EagleHead", "last_metrics"}
    assert all(hasattr(hf_specdec, name) for name in used)
    assert '"me/head"' in code and '"owner/target"' in code


def _is_ours(node):
    return isinstance(node.value, ast.Name) and node.value.id == "hf_specdec"


def test_saved_beside_the_weights(tmp_path):
    model = head()
    model.save_pretrained(tmp_path / "without")
    assert not (tmp_path / "without" / "README.md").exists()
    model.save_pretrained(tmp_path / "with", card=model.model_card())
    assert "speculative-decoding" in (tmp_path / "with" / "README.md").read_text()
