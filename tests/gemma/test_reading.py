"""What is read of an assistant's checkpoint, by which names a call takes it, and what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.gemma import make_target, write_assistant
from support.goldens import TINY_TARGET
from support.models import tiny_model
from support.plain import greedy_text
from transformers import PreTrainedModel

from hf_specdec import GemmaAssistant, last_metrics, load_draft
from hf_specdec.drafters import as_drafter
from hf_specdec.trees import TokenTree


GOLDEN = TINY_TARGET.parent / "gemma4_assistant"
INPUTS = {"input_ids": torch.tensor([[5, 9, 33, 21]])}


@cache
def the_target() -> PreTrainedModel:
    return make_target()


def test_names(tmp_path: Path) -> None:
    """Of a folder, loaded by the call or before it, and saved again."""
    folder = write_assistant(tmp_path / "published")
    assistant = load_draft(str(folder))
    assert isinstance(assistant, GemmaAssistant)
    assistant.save_pretrained(tmp_path / "saved")
    plain, accepted = greedy_text(the_target(), INPUTS, max_new_tokens=12), []
    for draft in (str(folder), assistant, str(tmp_path / "saved")):
        text = the_target().generate(
            **INPUTS, max_new_tokens=12, do_sample=False, assistant_model=draft, tree="chain:3"
        )
        assert text.equal(plain)
        accepted.append(last_metrics().accepted_per_step)
    assert accepted[0] == accepted[1] == accepted[2]


def test_logits_of_few_centroids(tmp_path: Path) -> None:
    """The tokens of the best centroids have their own logits, and all others one below the lowest of these."""
    assistant = load_draft(str(write_assistant(tmp_path))).eval()
    states = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
    embeddings, part = assistant.model.embed_tokens.weight, assistant.masked_embedding
    with torch.no_grad():
        found, full = part(states, embeddings), states @ embeddings.T
        best = (states @ part.centroids.weight.T).topk(3).indices
    for row in range(2):
        for node in range(3):
            tokens = part.token_ordering.view(8, 8)[best[row, node]].flatten()
            expected = torch.full((64,), float(full[row, node, tokens].min()) - 1.0)
            expected[tokens] = full[row, node, tokens]
            torch.testing.assert_close(found[row, node], expected)


def loaded_by_transformers() -> Any:
    try:
        return transformers.Gemma4AssistantForCausalLM.from_pretrained(GOLDEN / "assistant").eval()
    except ValueError as error:
        pytest.skip(f"this release cannot build it: {error}")


def test_an_assistant_that_transformers_has_loaded() -> None:
    target = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "target").eval()
    prompt = {"input_ids": load_file(GOLDEN / "golden.safetensors")["input_ids"]}
    accepted = []
    for draft in (load_draft(str(GOLDEN / "assistant")), loaded_by_transformers()):
        target.generate(**prompt, max_new_tokens=16, do_sample=False, assistant_model=draft, tree="chain:3")
        accepted.append(last_metrics().accepted_per_step)
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"text": {"vocab_size": 128}}, "a vocabulary of 128, but the target Gemma4ForCausalLM has 64"),
        ({"backbone_hidden_size": 48}, "a hidden size of 48, but the target Gemma4ForCausalLM has 32"),
        ({"text": {"head_dim": 12}}, "keys of size 12 in layers of the kind sliding_attention"),
        ({"text": {"num_attention_heads": 3}}, "3 heads in layers of the kind full_attention"),
    ],
)
def test_assistants_of_another_gemma(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assistant = load_draft(str(write_assistant(tmp_path, **changes)))
    with pytest.raises(ValueError, match=message):
        the_target().generate(**INPUTS, max_new_tokens=4, assistant_model=assistant, tree="chain:2")


def test_other_targets(tmp_path: Path) -> None:
    drafter = as_drafter(load_draft(str(write_assistant(tmp_path))))
    with pytest.raises(ValueError, match="keys and values of a Gemma 4, but the target is LlamaForCausalLM"):
        drafter.check(tiny_model("llama"), TokenTree.chain(1))
    one_kind = make_target(num_kv_shared_layers=0, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ValueError, match="layers of the kind sliding_attention, but the target"):
        drafter.check(one_kind, TokenTree.chain(1))


def test_damaged_checkpoints(tmp_path: Path) -> None:
    folder = write_assistant(tmp_path)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    save_file({key: one for key, one in weights.items() if "post_projection" not in key}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="assistant of Gemma 4: `post_projection.weight` is missing"):
        load_draft(str(folder))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_draft(str(folder))
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_centroids": 7}))
    with pytest.raises(ValueError, match="`num_centroids`=7"):
        load_draft(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"text_config": {"model_type": "gemma9_text"}}))
    with pytest.raises(ValueError, match="`text_config` of config.json describes no layers"):
        load_draft(str(folder))
    with pytest.raises(ValueError, match="`model_type`='llama'"):
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
        GemmaAssistant.from_pretrained(folder)
