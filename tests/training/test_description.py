"""The recipe that a run writes into the config of what it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.goldens import TINY_TARGET
from support.training import SMALL as OF_RUNS
from transformers import AutoConfig

import hf_specdec
from hf_specdec.eagle import EagleHead
from hf_specdec.training import TrainOptions, train
from hf_specdec.training.data import Text
from hf_specdec.training.description import describe_data, held_out


SMALL = OF_RUNS | {"unroll_steps": 3}


def write(path: Path, texts: list[Text]) -> str:
    path.write_text("".join(text.to_json() + "\n" for text in texts))
    return str(path)


def test_a_head_knows_its_recipe(tmp_path: Path, written: list[Text]) -> None:
    """Half of it when the run stops half-way, all of it at the end; the card shows it."""
    data = write(tmp_path / "texts.jsonl", written)
    options = {"output": str(tmp_path / "head"), "data": data, "epochs": 2.0, "learning_rate": 1e-3, **SMALL}
    stopped = train(TrainOptions(max_seconds=1e-3, **options))
    recipe = EagleHead.from_pretrained(tmp_path / "head").config.recipe
    assert recipe["steps"] == stopped.step == 1 and recipe["epochs"] < 1
    result = train(TrainOptions(**options))
    head = EagleHead.from_pretrained(tmp_path / "head")
    recipe = dict(head.config.recipe)
    top1, length = recipe.pop("held_out_top1"), recipe.pop("held_out_acceptance_length")
    assert top1 == [round(result.after[f"eval_top1_{depth}"], 3) for depth in (1, 2, 3)]
    assert length == round(result.after["eval_acceptance_length"], 2)
    assert recipe.pop("hardware").startswith("1 × CPU")
    # All different texts but the held-out ones, which are not known from outside: between shortest and longest.
    lengths = sorted(map(len, {tuple(text.input_ids) for text in written}))
    trained = len(lengths) - SMALL["eval_texts"]
    assert sum(lengths[:trained]) <= recipe.pop("tokens") <= sum(lengths[-trained:])
    assert recipe == {
        "method": "EAGLE-3",
        "target": TINY_TARGET.name,
        "data": "texts.jsonl",
        "texts": trained,
        "max_length": 64,
        "epochs": 2.0,
        "steps": result.total_steps,
        "batch_tokens": 512,
        "learning_rate": 1e-3,
        "unroll_steps": 3,
        "decay": 0.8,
        "versions": f"hf_specdec {hf_specdec.__version__}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}",
    }
    assert "| batch tokens | 512 |" in head.model_card().text


def test_a_draft_model_knows_its_recipe_and_nothing_of_the_machine(tmp_path: Path, written: list[Text]) -> None:
    options = SMALL | {"output": str(tmp_path / "out"), "kind": "draft", "num_layers": 1, "hidden_size": 32}
    train(TrainOptions(data=write(tmp_path / "texts.jsonl", written), epochs=0.5, **options))
    recipe = AutoConfig.from_pretrained(tmp_path / "out").recipe
    assert recipe["method"] == "distillation of the target's logits" and len(recipe["held_out_top1"]) == 1
    for name in ("config.json", "tokenizer_config.json"):
        text = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in text and str(TINY_TARGET) not in text
        assert not {"_model_name_or_path", "_name_or_path", "is_local", "local_files_only"} & json.loads(text).keys()


def test_what_the_target_wrote(tmp_path: Path) -> None:
    openings = tmp_path / "openings.txt"
    openings.write_text("Write a poem\nTell me\n\nWhy\n")
    subjects = tmp_path / "subjects.txt"
    subjects.write_text("[food]\npeas\n[animal]\nbees\n")
    wrote = "conversations of which the target wrote both sides"
    usual = "30% of the answers greedy, 20% at temperature 0.3"
    assert describe_data(TrainOptions(output="x", self_generate=9)) == f"{wrote}; {usual}"
    options: dict[str, Any] = {"output": "x", "self_generate": 9, "openings": str(openings)}
    assert describe_data(TrainOptions(**options)) == f"{wrote}; 50% begin with one of 3 openings; {usual}"
    options |= {"subjects": str(subjects), "openings_share": 0.8, "greedy_share": 0.5, "cool_share": 0.0}
    assert describe_data(TrainOptions(**options)) == (
        f"{wrote}; 80% begin with one of 3 openings about 2 subjects; 50% of the answers greedy, 0% at temperature 0.3"
    )


@pytest.mark.parametrize(
    "option, said",
    [("data", "{}"), ("prompts", "answers of the target to {}; 30% of the answers greedy, 20% at temperature 0.3")],
)
def test_folders_are_not_published(tmp_path: Path, option: str, said: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.touch()
    assert describe_data(TrainOptions(output="x", **{option: str(file)})) == said.format("mine.jsonl")
    assert describe_data(TrainOptions(output="x", **{option: "owner/chats"})) == said.format("owner/chats")


def test_without_held_out_texts_nothing_is_said_of_them() -> None:
    assert held_out([{"loss": 1.0, "top1_1": 0.5}], "eagle3") == {}


def test_the_last_evaluation_counts() -> None:
    logs = [{"eval_top1_1": share, "eval_top1_2": share / 2, "eval_acceptance_length": 1.2345} for share in (0.2, 0.4)]
    assert held_out(logs, "eagle3") == {"held_out_top1": [0.4, 0.2], "held_out_acceptance_length": 1.23}
    assert held_out(logs, "draft")["held_out_top1"] == [0.4]
