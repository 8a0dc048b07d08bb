"""Whole runs on the tiny trained target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.chat import chat_tokenizer
from support.goldens import TINY_TARGET, trained_prompts, trained_target
from support.models import tiny_model
from support.training import RUN, log_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.eagle import EagleHead
from hf_specdec.training import TrainOptions, recipe, train
from hf_specdec.training.corpus import Corpus


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.some_cases(1)
def test_a_head_learns_and_drafts(tmp_path: Path, data: Path, kind: str) -> None:
    options = {"draft_vocab_size": 256} if kind == "eagle3" else {}
    result = train(
        TrainOptions(output=str(tmp_path), kind=kind, data=str(data), epochs=4, learning_rate=2e-3, **RUN, **options)
    )
    assert result.finished and result.step == result.total_steps
    assert result.after["eval_loss"] < 0.95 * result.before["eval_loss"]
    head = EagleHead.from_pretrained(tmp_path)
    assert head.config.target_name == str(TINY_TARGET)
    target, prompt = trained_target(), torch.tensor([trained_prompts()["prompts"][0]])
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=head), plain)
    assert hf_specdec.last_metrics().num_drafts > 0
    records = log_of(tmp_path)
    depths = 3 if kind == "eagle3" else 1
    assert all(f"top1_{depth}" in record for record in records if "loss" in record for depth in range(1, depths + 1))
    assert any("eval_acceptance_length" in record and "eval_top1_3" in record for record in records)


@pytest.mark.parametrize("hidden_size", [pytest.param(None, marks=pytest.mark.slow), 32])
def test_a_draft_model_learns_and_loads(tmp_path: Path, data: Path, hidden_size: int | None) -> None:
    options = TrainOptions(
        output=str(tmp_path), kind="draft", data=str(data), num_layers=1, hidden_size=hidden_size, epochs=2, **RUN
    )
    result = train(options)
    assert result.after["eval_loss"] < result.before["eval_loss"]
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert draft.config.hidden_size == (hidden_size or 64)
    assert AutoTokenizer.from_pretrained(tmp_path)("t5 t6")["input_ids"][-2:] == [5, 6]
    target, prompt = trained_target(), torch.tensor([trained_prompts()["prompts"][0]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    output = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft, tree="[(0,), (1,)]")
    assert torch.equal(output, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle1", "draft"))]
)
def test_what_was_trained_is_trained_further(tmp_path: Path, data: Path, kind: str) -> None:
    """The second run begins where the first ended, at its own learning rate, with the sizes of what it starts from."""
    sizes = {"eagle3": {"draft_vocab_size": 100, "intermediate_size": 96}, "eagle1": {}, "draft": {"num_layers": 1}}
    options = {"kind": kind, "data": str(data), "epochs": 2, **RUN}
    first = train(TrainOptions(output=str(tmp_path / "first"), learning_rate=2e-3, **options, **sizes[kind]))
    if kind != "draft":
        other = EagleHead.from_pretrained(tmp_path / "first")
        other.config.target_name = "another target"
        other.save_pretrained(tmp_path / "first")
    more = {"start_from": str(tmp_path / "first"), "learning_rate": 1e-5}
    second = train(TrainOptions(output=str(tmp_path / "second"), **options, **more))
    assert second.before["eval_loss"] == pytest.approx(first.after["eval_loss"], rel=0.02)
    assert second.before["eval_loss"] < 0.95 * first.before["eval_loss"]
    with open(tmp_path / "second" / "config.json") as file:
        config = json.load(file)
    assert config["recipe"]["start_from"] == "first"
    assert kind == "draft" or config["target_name"] == str(TINY_TARGET)
    assert kind != "eagle3" or (config["draft_vocab_size"], config["text_config"]["intermediate_size"]) == (100, 96)


def test_what_cannot_be_trained_further(tmp_path: Path, data: Path) -> None:
    start = str(Path(__file__).parents[1] / "goldens" / "specforge_eagle3")
    options = {"output": str(tmp_path), "data": str(data), "start_from": start, **RUN}
    with pytest.raises(ValueError, match="version 3: use `kind='eagle3'`"):
        train(TrainOptions(kind="eagle1", **options))
    with pytest.raises(ValueError, match="`num_layers` is what `start_from`="):
        TrainOptions(num_layers=1, **options)
    writes = options | {"output": str(tmp_path / "writes"), "data": None, "self_generate": 4}
    with pytest.raises(ValueError, match="version 3: use `kind='eagle3'`"):
        train(TrainOptions(kind="eagle1", **writes))
    assert not list((tmp_path / "writes").glob("data/*.jsonl")), "the target has written before it was looked at"
    tiny_model("llama", vocab_size=64).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="vocabulary of 64"):
        train(
            TrainOptions(
                kind="draft", **options | {"start_from": str(tmp_path / "other"), "output": str(tmp_path / "b")}
            )
        )


@pytest.mark.parametrize("rows_at_once, expected", [(3, (3, 3)), (5, (4, 2)), (99, (8, 1))])
def test_a_step_has_its_rows(
    rows_at_once: int, expected: tuple[int, int], tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 of 64 tokens, or few more, however many fit at once."""
    made: list[Any] = []
    original = recipe._Run._arguments

    def noting(self: Any, num_rows: int) -> Any:
        made.append(original(self, num_rows))
        return made[-1]

    monkeypatch.setattr(recipe._Run, "_arguments", noting)
    options = RUN | {"rows_at_once": rows_at_once}
    train(TrainOptions(output=str(tmp_path), kind="eagle3", data=str(data), epochs=0.2, **options))
    (arguments,) = made
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == expected


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("draft", marks=pytest.mark.slow)])
def test_a_target_in_half_precision_on_the_cpu(kind: str, tmp_path: Path, data: Path) -> None:
    options = {"num_layers": 1} if kind == "draft" else {}
    result = train(
        TrainOptions(output=str(tmp_path), kind=kind, data=str(data), dtype="bfloat16", epochs=0.3, **RUN, **options)
    )
    assert result.finished


def test_writing_for_so_long(tmp_path: Path) -> None:
    """What had begun is finished, and that is the data: the next run writes no more."""
    options = {"output": str(tmp_path), "self_generate": 10**9, "write_seconds": 0.5, "epochs": 0.1, **RUN}
    first = train(TrainOptions(max_seconds=30.0, generation_batch_size=8, **options))
    written = (tmp_path / "data" / "written-00000.jsonl").read_text()
    assert first.total_steps and len(written.splitlines()) >= 8
    assert train(TrainOptions(**options)).finished
    assert (tmp_path / "data" / "written-00000.jsonl").read_text() == written


@pytest.mark.slow
def test_a_head_that_shares_the_lm_head(tmp_path: Path, data: Path) -> None:
    """It is not stored, and serves in generate."""
    options = RUN | {"draft_vocab_size": 100, "shares_lm_head": True, "intermediate_size": 48}
    assert train(TrainOptions(output=str(tmp_path), data=str(data), **options)).finished
    head = EagleHead.from_pretrained(tmp_path)
    assert head.lm_head is None and len(head.target_ids) == 100
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys() and "d2t" in weights.keys()
    target, prompt = trained_target(), torch.tensor([[5, 8, 11, 9]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=head), plain)


@pytest.mark.parametrize(
    "kind, hidden_size",
    [
        ("draft", 16),
        ("eagle3", None),
        *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in ("draft", "eagle1")),
    ],
)
@pytest.mark.some_cases(1)
def test_a_chat_target_with_tied_embeddings(tmp_path: Path, kind: str, hidden_size: int | None) -> None:
    """It writes both sides; the run goes through three checkpoints; the head learns answers alone."""
    tokenizer = chat_tokenizer()
    target = tiny_model(tie_word_embeddings=True, dtype=torch.float32, sharpness=1.5, num_hidden_layers=3)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    changes = {"target": str(tmp_path / "target"), "kind": kind, "hidden_size": hidden_size, "turns": 2}
    options = RUN | changes | {"output": str(tmp_path / "out"), "self_generate": 30, "epochs": 4}
    train(TrainOptions(**options, max_seconds=1e-6))  # no time to write
    Corpus(TrainOptions(**options), tmp_path / "out" / "data", target, tokenizer).texts()
    stops = [train(TrainOptions(**options, max_seconds=1e-3)).step for _ in range(3)]
    assert stops == [1, 2, 3]
    assert train(TrainOptions(**options)).finished
    output = tmp_path / "out"
    draft = AutoModelForCausalLM.from_pretrained(output) if kind == "draft" else EagleHead.from_pretrained(output)
    prompt = torch.tensor([[1, 4, 9, 10]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    output = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft, tree="[(0,), (0, 0)]")
    assert torch.equal(output, plain)


def test_prompts_are_answered(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"t1 t{5 + i}"}) + "\n" for i in range(12)))
    result = train(
        TrainOptions(output=str(tmp_path / "out"), prompts=str(tmp_path / "prompts.jsonl"), epochs=0.5, **RUN)
    )
    assert result.finished
    lines = (tmp_path / "out" / "data" / "written-00000.jsonl").read_text().splitlines()
    texts = {record["job"]: record["input_ids"] for record in map(json.loads, lines)}
    assert all(texts[index][:2] == [1, 5 + index] for index in range(12))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "Give one of"),
        ({"data": "x", "self_generate": 5}, "`data` and `self_generate`"),
        ({"self_generate": 0}, "`self_generate`=0"),
        ({"self_generate": 5, "kind": "eagle2"}, "`kind`='eagle2'"),
        ({"self_generate": 5, "hidden_size": 32}, "as wide as its target"),
        ({"self_generate": 5, "kind": "draft", "draft_vocab_size": 32}, "alone"),
        ({"self_generate": 5, "max_length": 8}, "max_length"),
        ({"self_generate": 5, "learning_rate": -1.0}, "learning_rate"),
        ({"self_generate": 5, "eval_texts": -1}, "eval_texts"),
        ({"data": "x", "openings": "y"}, "openings.*for `self_generate`"),
        ({"self_generate": 5, "subjects": "y"}, "`subjects`='y' fills places in `openings`"),
        ({"self_generate": 5, "openings_share": 1.5}, "`openings_share`=1.5 is a share"),
        ({"self_generate": 5, "cool_share": -0.1}, "`cool_share`=-0.1 is a share"),
        ({"self_generate": 5, "greedy_share": 0.9}, "more than all answers"),
        ({"self_generate": 5, "dtype": "int8"}, "`dtype`='int8' is not one of 'float32', 'bfloat16', 'float16'"),
        ({"self_generate": 5, "kind": "eagle1", "decay": 0.7}, "`decay` is for `kind='eagle3'` alone, not for"),
        ({"self_generate": 5, "kind": "draft", "recompute": True}, "`recompute` is for `kind='eagle3'` alone"),
        ({"data": "x", "greedy_share": 0.4}, "`greedy_share`=0.4 is for `prompts` and `self_generate` alone"),
        ({"data": "x", "cool_share": 0.1}, "`cool_share`"),
        ({"data": "x", "write_seconds": 9.0}, "`write_seconds`"),
        ({"data": "x", "generation_batch_size": 8}, "`generation_batch_size`"),
        ({"data": "x", "turns": 2}, "`turns`=2 is for `self_generate` alone, not for `data`"),
        ({"prompts": "x", "turns": 2}, "`turns`=2 is for `self_generate` alone, not for `prompts`"),
        ({"prompts": "x", "openings_share": 0.4}, "`openings_share`"),
        ({"self_generate": 5, "data_limit": 9}, "`data_limit`=9 is for `data` and `prompts` alone"),
        ({"self_generate": 5, "data_split": "test"}, "`data_split`"),
        ({"self_generate": 5, "strict_data": True}, "`strict_data`=True is for `data` and `prompts` alone"),
    ],
)
def test_options_that_make_no_run(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(output="x", **fields)
