"""The heads and the draft model in model_cards/, with SmolLM2-135M-Instruct: they load, fit, and draft well."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import write_card
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.loading import load_draft_to
from hf_specdec.smollm2 import SMOLLM2_HUB_ID, smollm2_folder


ROOT = Path(__file__).parent.parent
HEAD = ROOT / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
BLOCK = ROOT / "model_cards" / "SmolLM2-135M-Instruct-DSpark"
DRAFT = ROOT / "model_cards" / "SmolLM2-135M-Instruct-draft"
METHODS = {HEAD: "eagle3", BLOCK: "dspark"}
MEGABYTES = {HEAD: 20, BLOCK: 20, DRAFT: 24}
# Of the mean acceptance length: well below what was measured, so that other rounding does not matter.
FLOORS = {HEAD: 2.5, BLOCK: 2.5, DRAFT: 1.3}
PROMPTS = (
    "Why does bread rise in the oven?",
    "Write a Python function that counts the vowels in a string.",
    "Write a short letter to a friend who has moved to another town.",
)

each = pytest.mark.parametrize("folder", [HEAD, BLOCK, DRAFT], ids=lambda folder: folder.name)


@pytest.fixture(autouse=True)
def weights_are_there() -> None:
    if not all((folder / "model.safetensors").is_file() for folder in MEGABYTES):
        pytest.skip("model_cards/ has no weights")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder())


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.fixture(scope="module")
def plain(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """What the target alone writes after the first prompt, `[1, length]`."""
    return target.generate(**encode(tokenizer, PROMPTS[0]), max_new_tokens=24, do_sample=False)


def acceptance(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, tree: Any) -> float:
    """The mean over the prompts."""
    draft, lengths = load_draft_to(str(folder), torch.float32, "cpu"), []
    for prompt in PROMPTS:
        inputs = encode(tokenizer, prompt)
        target.generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=draft, tree=tree)
        lengths.append(hf_specdec.last_metrics().mean_acceptance_length)
    return mean(lengths)


@each
def test_shipped_weights_are_small(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MEGABYTES[folder] * 1e6


@each
@pytest.mark.some_cases(1)
def test_greedy_texts_are_those_of_plain_generate(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plain: torch.Tensor, folder: Path
) -> None:
    draft = load_draft_to(str(folder), torch.float32, "cpu")
    inputs = encode(tokenizer, PROMPTS[0])
    config = hf_specdec.SpeculativeConfig()
    output = target.generate(
        **inputs, max_new_tokens=24, do_sample=False, assistant_model=draft, speculative_config=config
    )
    assert torch.equal(output, plain)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("head", METHODS, ids=METHODS.get)
def test_the_heads_draft_well(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, head: Path) -> None:
    tree = hf_specdec.DynamicTree(depth=8, top_k=10, num_nodes=59)
    assert acceptance(target, tokenizer, head, tree) > FLOORS[head]


@pytest.mark.slow
def test_the_draft_model_drafts_well(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert acceptance(target, tokenizer, DRAFT, hf_specdec.TokenTree.chain(5)) > FLOORS[DRAFT]


def test_the_head_has_its_recipe() -> None:
    config = hf_specdec.EagleHead.from_pretrained(HEAD).config
    assert (config.target_name, config.eagle_version) == (SMOLLM2_HUB_ID, 3)
    assert {"data", "tokens", "epochs", "steps", "hardware", "versions"} <= config.recipe.keys()
    assert len(config.recipe["held_out_top1"]) == config.recipe["unroll_steps"]


def test_the_block_head_has_its_recipe_and_no_matrices_of_the_target() -> None:
    head = hf_specdec.load_draft(str(BLOCK))
    config = head.config
    assert (config.kind, config.target_name, config.num_target_layers) == ("dspark", SMOLLM2_HUB_ID, 30)
    assert not (config.has_embeddings or config.has_lm_head) and config.markov_rank <= 16
    assert {"data", "tokens", "epochs", "steps", "hardware", "versions"} <= config.recipe.keys()
    assert len(config.recipe["held_out_top1"]) == config.num_drafts
    assert json.loads((BLOCK / "config.json").read_text())["speculators_model_type"] == "dspark"


def test_the_draft_has_the_targets_tokenizer_and_no_traces_of_a_machine(tokenizer: PreTrainedTokenizerBase) -> None:
    own = AutoTokenizer.from_pretrained(DRAFT)
    assert own.get_vocab() == tokenizer.get_vocab()
    text = "Hello, wörld! 1234   x\n\tdef f(a): return a**2  # 你好 🙂"
    assert own(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert encode(own, text)["input_ids"].equal(encode(tokenizer, text)["input_ids"])
    assert (own.eos_token_id, own.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    for name in ("config.json", "tokenizer_config.json"):
        odd = {"_name_or_path", "_model_name_or_path", "is_local", "local_files_only"}
        assert not odd & json.loads((DRAFT / name).read_text()).keys()


@each
def test_their_cards(folder: Path) -> None:
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.base_model, data.license, data.pipeline_tag) == (SMOLLM2_HUB_ID, "apache-2.0", "text-generation")
    assert data.library_name == ("hf_specdec" if folder in METHODS else "transformers")
    assert "speculative-decoding" in data.tags
    assert set(METHODS.values()) & set(data.tags) == ({METHODS[folder]} if folder in METHODS else set())
    for heading in ("## How to use", "## Measured", "## Training"):
        assert heading in card.text
    assert data.model_name == folder.name
    settings = [(found.dataset_name, found.metric_args["temperature"]) for found in data.eval_results]
    for task in ("chat", "HumanEval"):
        for temperature in (0.0, 1.0):
            assert any(name.startswith(task) and at == temperature for name, at in settings)
    trees = {found.metric_args["tree"] for found in data.eval_results}
    assert {"chain of 5", "tree of 60"} <= trees
    assert not re.findall(r"(?<![\w/:])/(?:root|home|tmp|mnt)/\S*", card.content)  # folders of a machine


@each
def test_their_cards_are_made_of_the_figures_beside_them(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    (copy / "README.md").unlink()
    write_card.main(["--head" if folder in METHODS else "--draft", str(copy)])
    for name in ("README.md", "measurements.json"):
        assert (copy / name).read_text() == (folder / name).read_text()


def test_make_demo_takes_the_head() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"HEAD := {HEAD.relative_to(ROOT)}\n" in makefile
    assert "DEMO := --draft $(HEAD) " in makefile and "hf-specdec demo $(DEMO) " in makefile
