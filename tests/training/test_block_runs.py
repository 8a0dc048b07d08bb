"""Whole runs of block heads on the tiny trained target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from support.models import tiny_model
from support.training import SMALL as OF_RUNS
from support.training import losses_of
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import BlockHead
from hf_specdec.cli import build_app
from hf_specdec.training import TrainOptions, train
from hf_specdec.training.kinds.block import choose_mask_token, new_block_config, new_block_head


SMALL = OF_RUNS | {"block_size": 5, "num_layers": 1, "num_anchors": 24}
KINDS = ["dflash", "dspark"]


def keys_of(output: Path) -> set[str]:
    with safe_open(output / "model.safetensors", "pt") as weights:
        return set(weights.keys())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_cases(1)
def test_a_head_learns_and_drafts(tmp_path: Path, data: Path, kind: str) -> None:
    """It has no embeddings and no lm_head; the text is the target's own."""
    result = train(
        TrainOptions(output=str(tmp_path), kind=kind, data=str(data), epochs=8, learning_rate=2e-3, **SMALL)
    )
    assert result.finished and result.step == result.total_steps
    assert result.after["eval_loss"] < 0.97 * result.before["eval_loss"]
    head = BlockHead.from_pretrained(tmp_path)
    assert (head.config.kind, head.config.target_name) == (kind, str(TINY_TARGET))
    assert head.config.anchor_first == head.config.has_confidence_head == (kind == "dspark")
    assert head.config.markov_rank == (64 if kind == "dspark" else 0)
    assert not {key for key in keys_of(tmp_path) if "embed" in key or "lm_head" in key or "d2t" in key}
    target, prompt = trained_target(), torch.tensor([trained_prompts()["prompts"][0]])
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=head), plain)
    assert hf_specdec.last_metrics().num_drafts > 0
    recipe = head.config.recipe
    drafts = 5 if kind == "dspark" else 4
    assert recipe["held_out_top1"] == [round(result.after[f"eval_top1_{depth + 1}"], 3) for depth in range(drafts)]
    assert (recipe["method"], recipe["block_size"], recipe["anchors"]) == (type_name(kind), 5, 24)
    loss = {"dflash": "1 · cross-entropy", "dspark": "0.1 · cross-entropy + 0.9 · distance + 1 · confidence"}
    assert recipe["loss"] == loss[kind]
    assert "unroll_steps" not in recipe and "| anchors | 24 |" in head.model_card().text


def type_name(kind: str) -> str:
    return {"dflash": "DFlash", "dspark": "DSpark"}[kind]


@pytest.mark.parametrize("shares_lm_head", [False, True])
@pytest.mark.some_cases(1)
def test_a_draft_vocabulary(tmp_path: Path, data: Path, shares_lm_head: bool) -> None:
    """The lm_head has the target's rows before and after, or is not stored."""
    options = SMALL | {"draft_vocab_size": 100, "shares_lm_head": shares_lm_head, "markov_rank": 4}
    train(TrainOptions(output=str(tmp_path), kind="dspark", data=str(data), epochs=1, **options))
    head, target = BlockHead.from_pretrained(tmp_path), trained_target()
    assert len(head.target_ids) == 100 and ("lm_head.weight" in keys_of(tmp_path)) != shares_lm_head
    if not shares_lm_head:
        assert torch.equal(head.lm_head.weight, target.lm_head.weight[head.target_ids])
    prompt = torch.tensor([[5, 8, 11, 9]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=head), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"kind": "dflash"}, {"kind": "dspark", "optimizer": "muon", "loss_weights": "divergence=1,confidence=1"}],
    ids=["dflash", "dspark, muon"],
)
def test_a_run_that_stops_in_time_continues_as_if_it_had_not(tmp_path: Path, data: Path, more: dict[str, Any]) -> None:
    """Anchors are drawn as they would have been."""
    options = {"data": str(data), "epochs": 1.0, "eval_steps": 2, **SMALL, **more}
    whole = train(TrainOptions(output=str(tmp_path / "whole"), **options))
    assert whole.total_steps >= 3
    for _ in range(whole.total_steps):
        result = train(TrainOptions(output=str(tmp_path / "parts"), max_seconds=1e-3, **options))
    assert result.finished
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    weights = [BlockHead.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_what_was_trained_is_trained_further(tmp_path: Path, data: Path) -> None:
    options = {"kind": "dspark", "data": str(data), "epochs": 4, **SMALL}
    first = train(TrainOptions(output=str(tmp_path / "first"), learning_rate=2e-3, markov_rank=4, **options))
    sizes = {"block_size", "num_layers"}
    more = {name: value for name, value in options.items() if name not in sizes}
    more |= {"start_from": str(tmp_path / "first"), "learning_rate": 1e-5}
    second = train(TrainOptions(output=str(tmp_path / "second"), **more))
    assert second.before["eval_loss"] == pytest.approx(first.after["eval_loss"], rel=1e-3)
    with pytest.raises(ValueError, match="of kind 'dspark': use `kind='dspark'`"):
        train(TrainOptions(output=str(tmp_path / "third"), **more | {"kind": "dflash"}))
    start = {"start_from": str(TINY_TARGET.parent / "dflash2"), "kind": "dflash"}
    with pytest.raises(ValueError, match="kind 'dflash2': 'dflash' and 'dspark' are trained"):
        train(TrainOptions(output=str(tmp_path / "fourth"), **more | start))


def test_a_published_head_is_trained_further(tmp_path: Path, data: Path) -> None:
    """DeepSpec's has embeddings and an lm_head of its own, which stay as they are."""
    start = str(TINY_TARGET.parent / "dspark")
    options = {name: value for name, value in SMALL.items() if name not in ("block_size", "num_layers")}
    train(TrainOptions(output=str(tmp_path), kind="dspark", data=str(data), epochs=0.3, start_from=start, **options))
    before, after = (BlockHead.from_pretrained(name).state_dict() for name in (start, str(tmp_path)))
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert before.keys() == after.keys() and changed == before.keys() - {"embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"block_size": 1}, "`block_size`=1: choose 2 … 63"),
        ({"block_size": 64}, "`block_size`=64: choose 2"),
        ({"mask_token_id": -1}, "`mask_token_id`"),
        ({"num_anchors": 0}, "`num_anchors`=0"),
        ({"gamma": 0.0}, "`gamma`=0.0"),
        ({"optimizer": "sgd"}, "`optimizer`='sgd' is not one of 'adamw', 'muon'"),
        ({"loss_weights": "kl=1"}, "`loss_weights`='kl=1'"),
        ({"loss_weights": "divergence=1,confidence=1"}, "`kind='dflash'` have no confidence"),
        ({"kind": "eagle3", "loss_weights": "divergence=1"}, "`loss_weights` is for"),
        ({"markov_rank": 8}, "`markov_rank` is for `kind='dspark'` alone, not for 'dflash'"),
        ({"kind": "eagle3", "causal": True}, "`causal` is for `kind='dflash'` and `kind='dspark'` alone"),
        ({"kind": "draft", "num_anchors": 5}, "`num_anchors`"),
        ({"unroll_steps": 3}, "`unroll_steps` is for"),
        ({"decay": 0.5}, "`decay` is for `kind='eagle3'` alone, not for 'dflash'"),
        ({"recompute": True}, "`recompute` is for"),
        ({"shares_lm_head": True}, "`shares_lm_head`: without `draft_vocab_size`"),
        ({"hidden_size": 32}, "as wide as its target"),
        ({"start_from": "x", "mask_token_id": 3}, "`mask_token_id` is what `start_from`='x' has"),
    ],
)
def test_options_that_make_no_run(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**{"output": "x", "kind": "dflash", "data": "x", "max_length": 64, **fields})


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mask_token_id": 512}, "`mask_token_id`=512 is outside the vocabulary of 512"),
        ({"aux_layer_ids": (1, 60)}, "does not have"),
        ({"num_heads": 3}, "`num_heads`=3 and `num_kv_heads`=2"),
    ],
)
def test_what_does_not_fit_the_target(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """It is said before the target writes."""
    with pytest.raises(ValueError, match=message):
        train(TrainOptions(output=str(tmp_path), kind="dflash", self_generate=4, **SMALL | fields))
    assert not list(tmp_path.glob("data/*.jsonl"))


def test_a_new_head() -> None:
    """Layers like the target's, hidden states as z-lab spreads them, the target's final norm."""
    target = tiny_model(num_hidden_layers=10, dtype=torch.float32)
    config = new_block_config(target, block_size=8, mask_token_id=3)
    assert config.text_config.num_hidden_layers == 5
    assert config.aux_layer_ids == [2, 3, 5, 7, 8] and config.num_aux_features == 5
    assert new_block_config(target, block_size=8, mask_token_id=3, num_layers=1).aux_layer_ids == [2, 5, 8]
    head = new_block_head(target, config)
    assert torch.equal(head.norm.weight, target.model.norm.weight)
    few = new_block_config(target, block_size=8, mask_token_id=3, num_heads=2, num_kv_heads=1, aux_layer_ids=[7, 1])
    assert (few.text_config.num_attention_heads, few.text_config.num_key_value_heads) == (2, 1)
    assert few.aux_layer_ids == [1, 7]


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 7, 30])
def test_default_hidden_states_exist(layers: int) -> None:
    config = new_block_config(tiny_model(num_hidden_layers=layers), block_size=4, mask_token_id=0)
    boundaries = config.aux_boundaries(layers)
    assert boundaries == sorted(set(boundaries)) and max(boundaries) < layers


def test_the_mask_token_is_one_that_the_texts_do_not_use() -> None:
    tokenizer, counts = trained_tokenizer(), torch.ones(512, dtype=torch.long)
    counts[[0, 1, 2, 300]] = 0  # pad, bos, eos
    assert choose_mask_token(tokenizer, counts) == 0
    counts[0] = 1
    assert choose_mask_token(tokenizer, counts) == 300
    tokenizer.add_special_tokens({"additional_special_tokens": ["t400", "<|reserved_1|>", "t7"]})
    assert tokenizer.convert_tokens_to_ids("<|reserved_1|>") == 512
    assert choose_mask_token(tokenizer, torch.cat([counts, torch.zeros(1, dtype=torch.long)])) == 512
    counts[[7, 400]] = 0
    assert choose_mask_token(tokenizer, counts) == 7
    with pytest.raises(ValueError, match="`mask_token_id`: the texts use every token"):
        choose_mask_token(tokenizer, torch.ones(512, dtype=torch.long))


def test_the_command(tmp_path: Path, data: Path) -> None:
    command = ["train", "--output", str(tmp_path / "out"), "--data", str(data), "--target", str(TINY_TARGET)]
    command += "--max-length 64 --batch-tokens 512 --eval-texts 8 --cpu --no-progress --epochs 0.3".split()
    command += "--kind dflash --block-size 4 --num-layers 1 --num-anchors 8 --gamma 2 --causal".split()
    command += "--mask-token-id 3 --num-heads 2 --num-kv-heads 1 --aux-layer-ids 2,5".split()
    result = CliRunner().invoke(build_app(), command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "simulated acceptance length" in result.output and "BlockHead.from_pretrained" in result.output
    config = BlockHead.from_pretrained(tmp_path / "out").config
    assert (config.block_size, config.causal, config.mask_token_id, config.aux_layer_ids) == (4, True, 3, [2, 5])
    assert config.recipe["gamma"] == 2


def greedy_acceptance(head: BlockHead) -> float:
    """Tokens a step of a chain, over some prompts."""
    chain = str([(0,) * depth for depth in range(1, head.num_drafts + 1)])
    steps = accepted = 0
    for prompt in trained_prompts()["prompts"][:6]:
        trained_target().generate(
            torch.tensor([prompt]), max_new_tokens=48, do_sample=False, assistant_model=head, tree=chain
        )
        metrics = hf_specdec.last_metrics()
        steps, accepted = steps + metrics.num_drafts, accepted + metrics.num_accepted_tokens
    return 1 + accepted / steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_acceptance(tmp_path: Path, kind: str) -> None:
    """On text that the target writes, a head gets further than one that has not been trained."""
    options = SMALL | {"self_generate": 300, "greedy_share": 0.8, "generation_batch_size": 128}
    options |= {"num_layers": 2, "epochs": 14.0, "learning_rate": 2e-3}
    train(TrainOptions(output=str(tmp_path), kind=kind, **options))
    head = BlockHead.from_pretrained(tmp_path)
    new = new_block_head(trained_target(), head.config)
    assert greedy_acceptance(head) > greedy_acceptance(new) + 0.3
