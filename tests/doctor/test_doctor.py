"""The doctor finds what was misread, says how to read it, and leaves good heads alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from support.eagle import GOLDENS, publish, published
from support.goldens import TINY_TARGET, trained_prompts, trained_target, trained_tokenizer
from support.heads import tiny_head
from support.models import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec import EagleConfig, EagleHead
from hf_specdec.doctor import Diagnosis, diagnose, examination
from hf_specdec.doctor.measuring import Chains, ReadText, Text, chains_on
from hf_specdec.doctor.readings import readings, reread


PROMPTS = tuple(trained_tokenizer().decode(ids) for ids in trained_prompts()["prompts"][:2])


def examine(folder: Path, target: PreTrainedModel | None = None, **options: Any) -> Diagnosis:
    options = {"prompts": PROMPTS, "max_new_tokens": 40} | options
    return diagnose(target or trained_target(), trained_tokenizer(), str(folder), **options)


@lru_cache
def as_published(name: str) -> Diagnosis:
    return examine(GOLDENS / name)


def misread(folder: Path, source: str, **changes: Any) -> Path:
    """A head in our own format, whose config says something else than the head was trained with."""
    head = EagleHead.from_pretrained(GOLDENS / source, dtype=torch.float32)
    for name, value in changes.items():
        setattr(head.config, name, value)
    head.save_pretrained(folder)
    return folder


def recommended(diagnosis: Diagnosis) -> EagleHead:
    """What the recommended call gives."""
    return eval(diagnosis.fix.strip("`"), {"EagleHead": EagleHead})


# ------------------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    "name", ["safeailab_eagle1", "safeailab_eagle3", "speculators_eagle3", "specforge_eagle3", "modelopt_eagle3"]
)
@pytest.mark.some_cases(1)
def test_good_heads(name: str) -> None:
    diagnosis = as_published(name)
    assert diagnosis.is_good
    assert "fits as it is read" in diagnosis.verdict
    assert diagnosis.format.startswith(name.split("_")[0])
    assert len(diagnosis.as_read.top1) == 5
    assert diagnosis.tree_acceptance_length > 2
    assert diagnosis.keys["used"]
    assert diagnosis.num_tokens == 2 * 40


@pytest.mark.slow
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
    """The fix is found, and loading the head as it says is reading it rightly."""
    diagnosis = examine(misread(tmp_path / "head", source, **wrong))
    assert not diagnosis.is_good
    assert "misread" in diagnosis.verdict and fix in diagnosis.fix
    assert diagnosis.best.acceptance_length == as_published(source).as_read.acceptance_length
    recommended(diagnosis).save_pretrained(tmp_path / "fixed")
    again = examine(tmp_path / "fixed", prompts=PROMPTS[:1])
    assert again.best is again.as_read


def untrained_embeddings(folder: Path) -> Path:
    config, weights = published("specforge_eagle3")
    return publish(folder, config, weights | {"embed_tokens.weight": torch.randn(config["vocab_size"], 64)})


def untrained_lm_head(folder: Path) -> Path:
    trained = EagleHead.from_pretrained(GOLDENS / "safeailab_eagle1", dtype=torch.float32)
    head = EagleHead(trained.config.changed(has_lm_head=True))
    head.load_state_dict(trained.state_dict(), strict=False)
    head.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, source, name, field",
    [
        (untrained_embeddings, "specforge_eagle3", "the target's embeddings", "has_embeddings"),
        (untrained_lm_head, "safeailab_eagle1", "the target's lm_head", "has_lm_head"),
    ],
)
def test_tensors_that_were_never_trained(
    make: Callable[[Path], Path], source: str, name: str, field: str, tmp_path: Path
) -> None:
    """A checkpoint may hold embeddings or an lm_head that only look like the head's own; the target's are tried."""
    diagnosis = examine(make(tmp_path / "head"))
    assert not diagnosis.is_good
    assert f"misread: {name} raises" in diagnosis.verdict and diagnosis.best.changes == {field: False}
    assert diagnosis.best.acceptance_length == as_published(source).as_read.acceptance_length
    head = recommended(diagnosis)
    assert getattr(head.config, field) is False
    head.save_pretrained(tmp_path / "fixed")
    again = examine(tmp_path / "fixed", prompts=PROMPTS[:1])
    assert again.best is again.as_read


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, fields",
    [
        ("safeailab_eagle3", {"rope_theta": 20.0}),
        ("safeailab_eagle3", {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}),
        ("speculators_eagle3", {"transformer_layer_config": {"rope_parameters": {"rope_theta": 20.0}}}),
    ],
)
def test_the_rotary_embedding_of_published_heads(source: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Configs have the base at several places; the fix is the same call for all of them."""
    config, weights = published(source)
    for key, value in fields.items():
        config[key] = config[key] | value if isinstance(config.get(key), dict) else value
    folder = publish(tmp_path / "head", config, weights)
    diagnosis = examine(folder)
    assert not diagnosis.is_good
    assert "the target's rope_theta" in diagnosis.verdict and "rope_theta=10000.0)" in diagnosis.fix
    assert recommended(diagnosis).config.text_config.rope_parameters["rope_theta"] == 10_000.0
    assert diagnosis.best.acceptance_length == as_published(source).as_read.acceptance_length
    if source.startswith("safeailab"):
        assert examine(folder, **diagnosis.best.changes).is_good


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


def test_what_is_reported_on_the_way() -> None:
    lines: list[str] = []
    diagnosis = examine(GOLDENS / "speculators_eagle3", max_new_tokens=12, report=lines.append)
    assert lines[:2] == ["The target answers prompt 1 of 2.", "The target answers prompt 2 of 2."]
    for line, agreement in zip(lines[2:], diagnosis.agreements, strict=False):
        assert f", {agreement.name}: {agreement.acceptance_length:.2f} tokens a step" in line
    assert len(lines) == 2 + len(diagnosis.agreements) + 1


@pytest.mark.parametrize("prompts", [(), [], "a text"])
def test_no_prompts(prompts: Any) -> None:
    with pytest.raises(ValueError, match="`prompts` must hold texts .* Give at least one"):
        examine(GOLDENS / "safeailab_eagle3", prompts=prompts)


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("name", ["safeailab_eagle1", "speculators_eagle3", "modelopt_eagle3"])
@pytest.mark.some_cases(1)
def test_agreement_is_that_of_real_chains(name: str) -> None:
    """Simulated chains that start where those of `generate` did accept as many tokens, step by step."""
    target, head, depth = trained_target(), EagleHead.from_pretrained(GOLDENS / name), 4
    steps = 0
    for prompt in trained_prompts()["prompts"][:2]:
        ids = torch.tensor([prompt])
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=head,
            tree="[(0,), (0,0), (0,0,0), (0,0,0,0)]",
            do_sample=False,
            max_new_tokens=96,
            return_dict_in_generate=True,
        )
        read = ReadText.of(Text(out.sequences[0], len(prompt)), [head.eval()], target)
        hits = chains_on(read, head, target, depth).hits
        simulated = hits.long().cumprod(dim=1).sum(dim=1).tolist()
        root, expected, real = 0, [], []
        for accepted in out.speculation.accepted_per_step[0]:
            if root < len(simulated):
                expected.append(simulated[root])
                real.append(accepted)
            root += accepted + 1
        assert real == expected
        assert len(set(real)) > 2
        steps += len(real)
    assert steps > 30


def test_what_the_figures_say() -> None:
    """Chains of 2 and 0 accepted tokens."""
    hits = torch.tensor([[True, True, False], [False, True, True]])
    agreement = examination.Agreement.of([Chains(hits, hits.log())], name="a", changes={}, boundaries=[])
    assert agreement.top1 == [0.5, 1.0, 0.5]
    assert agreement.acceptance_length == 2.0


# --------------------------------------------------------------------------------------------------- readings, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["safeailab_eagle1", "modelopt_eagle3_yarn"])
@pytest.mark.some_cases(2)
def test_rereading(name: str, dtype: torch.dtype) -> None:
    """Nothing is drawn, copied or rounded; what depends on the config is as in a head that was built with it."""
    head = EagleHead.from_pretrained(GOLDENS / name, dtype=dtype)
    target = copy.deepcopy(trained_target().config)
    target.rope_parameters = target.rope_parameters | {"rope_theta": 500_000.0}
    tried = readings(head.config, target)
    assert {"rope_theta": 500_000.0} in [changes for _, changes in tried]
    for _, changes in tried:
        random_state = torch.get_rng_state()
        other = reread(head, changes)
        assert torch.equal(torch.get_rng_state(), random_state)
        expected = EagleHead.from_pretrained(GOLDENS / name, dtype=dtype, **changes)
        assert not other.training and other.dtype == dtype
        left_out = {"lm_head.weight"} if changes == {"has_lm_head": False} else set()
        assert dict(head.named_parameters()).keys() - dict(other.named_parameters()).keys() == left_out
        for key, parameter in other.named_parameters():
            assert head.get_parameter(key).data_ptr() == parameter.data_ptr()
        buffers = dict(expected.named_buffers())
        assert buffers.keys() == dict(other.named_buffers()).keys()
        for key, buffer in other.named_buffers():
            assert buffer.device.type == "cpu" and buffer.dtype == buffers[key].dtype
            assert torch.equal(buffer, buffers[key])
        inputs = {"inputs_embeds": torch.randn(1, 7, 64), "features": torch.randn(1, 7, head.config.feature_size)}
        inputs = {key: value.to(dtype) for key, value in inputs.items()}
        with torch.no_grad():
            assert torch.equal(other(**inputs).hidden_states, expected(**inputs).hidden_states)


def test_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head runs in the target's dtype, but for the frequencies of its rotary embedding."""
    heads = []
    monkeypatch.setattr(examination, "tree_acceptance_length", lambda head, *rest: heads.append(head) or 2.0)
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.bfloat16).eval()
    assert examine(GOLDENS / "safeailab_eagle3", target, prompts=PROMPTS[:1]).as_read.acceptance_length > 1.5
    assert heads[0].dtype == torch.bfloat16
    frequencies = EagleHead.from_pretrained(GOLDENS / "safeailab_eagle3").rotary_emb.inv_freq
    assert torch.equal(heads[0].rotary_emb.inv_freq, frequencies)


def test_readings_without_alternatives() -> None:
    """EAGLE-1 heads with the target's rotary embedding can be read in one way only."""
    config = EagleConfig(eagle_version=1)
    assert readings(config, trained_target().config) == [("as read", {})]


# ------------------------------------------------------------------------------------------------- targets elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("name", ["safeailab_eagle1", "speculators_eagle3"])
def test_offloaded_targets(name: str, tmp_path: Path) -> None:
    """All weights wait on the CPU, or some on disk, and are loaded when their module is called."""
    options = {"prompts": PROMPTS[:1], "max_new_tokens": 12}
    expected = examine(GOLDENS / name, **options)
    on_cpu = accelerate.cpu_offload(copy.deepcopy(trained_target()), execution_device=torch.device("cpu"))
    places = {"model.embed_tokens": "disk", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    layers = {f"model.layers.{layer}": "disk" if layer > 4 else "cpu" for layer in range(8)}
    on_disk = AutoModelForCausalLM.from_pretrained(
        TINY_TARGET, device_map=places | layers, offload_folder=tmp_path / "offload"
    ).eval()
    for target in (on_cpu, on_disk):
        assert target.get_output_embeddings().weight.device.type == "meta"
        found = examine(GOLDENS / name, target, **options)
        assert [agreement.top1 for agreement in found.agreements] == [
            agreement.top1 for agreement in expected.agreements
        ]
        assert found.tree_acceptance_length == expected.tree_acceptance_length
