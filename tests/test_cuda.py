"""What only a GPU shows: the plain PyTorch path on CUDA. Skipped, and said so, where there is none."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.caches import assert_same_states
from support.goldens import trained_prompts, trained_target
from support.heads import GOLDENS, trained_head
from support.hybrids import CAPTURED, draft_of, hybrid, is_known
from support.merges import noted_merges
from support.models import FAMILIES, UNEQUAL, noisy_copy, prompts, tiny_model
from support.sampling import ALL_SETTINGS
from transformers import LogitsProcessorList, PreTrainedModel

import hf_specdec
from hf_specdec import SpeculativeConfig
from hf_specdec.compat import CACHE


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TREES = ("[(0,), (0, 0), (0, 0, 0)]", hf_specdec.DynamicTree(depth=3, top_k=3, num_nodes=9))


def pair(noise: float, family: str = "llama", **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny target and a noisy draft, on the device."""
    target = tiny_model(family, **overrides)
    draft = noisy_copy(target, noise).cuda()
    return target.cuda(), draft


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("tree", TREES, ids=["chain", "dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain_generate(family: str, tree: object, batch_size: int) -> None:
    target, draft = pair(0.05, family)
    inputs = {name: value.cuda() for name, value in prompts(batch_size, 9, padding=True).items()}
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    tree_output = target.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=draft, tree=tree)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert torch.equal(plain, tree_output)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["masks", "kernel"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt2"])
def test_graphs(family: str, batch_size: int, dtype: torch.dtype) -> None:
    """Several prompts by the same graphs; the kernel takes no float64."""
    target, draft = pair(0.05, family, dtype=dtype)
    for tree in TREES:
        config = hf_specdec.SpeculativeConfig(tree=tree, cuda_graphs=True)
        for length in (9, 14):
            inputs = {name: value.cuda() for name, value in prompts(batch_size, length, padding=True).items()}
            plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
            output = target.generate(
                **inputs, max_new_tokens=30, do_sample=False, assistant_model=draft, speculative_config=config
            )
            assert hf_specdec.last_metrics().num_accepted_tokens > 0
            assert torch.equal(plain, output)


def test_graphs_of_layers_with_large_heads() -> None:
    """Heads of 520 dimensions beside those of 8, which the kernel takes."""
    family, values = UNEQUAL["gemma4"]
    target, draft = pair(0.05, family, dtype=torch.float32, **values | {"global_head_dim": 520})
    inputs = {name: value.cuda() for name, value in prompts(1, 9).items()}
    config = hf_specdec.SpeculativeConfig(tree=TREES[0], cuda_graphs=True)
    options = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(**inputs, **options)
    assert torch.equal(plain, target.generate(**inputs, **options, assistant_model=draft, speculative_config=config))
    (output,) = target.generate_batch(
        inputs["input_ids"].tolist(), **options, assistant_model=draft, speculative_config=config
    ).values()
    assert output.generated_tokens == plain[0, 9:].tolist()


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
def test_whole_steps(family: str, batch_size: int) -> None:
    """One graph a step; several prompts by the same one, with padding, and with an end token in the text."""
    target, draft = pair(0.05, family, dtype=torch.float32)
    for tree in TREES:
        for length in (9, 14):
            inputs = {name: value.cuda() for name, value in prompts(batch_size, length, padding=True).items()}
            text = target.generate(**inputs, max_new_tokens=30, do_sample=False)
            options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
            for end in (None, text[0, -8].item()):
                plain = target.generate(**inputs, **options, eos_token_id=end)
                output = target.generate(**inputs, **options, eos_token_id=end, assistant_model=draft, tree=tree)
                assert torch.equal(plain, output)
                metrics = hf_specdec.last_metrics()
                assert end is not None or ("steps" in metrics.seconds and metrics.num_accepted_tokens > 0)


@pytest.mark.filterwarnings("error:.*could not be")
@pytest.mark.parametrize(
    "family, way",
    [
        *(
            (family, way)
            for family in (*CAPTURED, "kimi_linear")
            for way in ("host", "forwards", "steps", "in flight")
        ),
        *((family, "compiled steps") for family in ("qwen3_5_text", "bamba")),
    ],
)
def test_states(family: str, way: str) -> None:
    """By kernels; several prompts by the same graphs, with padding, and the cache that is returned."""
    if not is_known(family):
        pytest.skip("this release has no such family")
    target = copy.deepcopy(hybrid(family)).cuda()
    for tree in TREES:
        for length in (9, 14):
            inputs = {name: value.cuda() for name, value in prompts(3, length, padding=length > 9).items()}
            options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
            plain = target.generate(**inputs, **options)
            draft = draft_of(plain.sequences.tolist()).cuda()
            config = SpeculativeConfig(
                tree=tree, cuda_graphs="auto" if way != "host" else False, compile=way == "compiled steps"
            )
            if way == "in flight":
                ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
                given = [[one for one, here in zip(*row, strict=True) if here] for row in zip(ids, mask, strict=True)]
                outputs = target.generate_batch(
                    given, assistant_model=draft, speculative_config=config, max_new_tokens=30
                )
                texts = [output.generated_tokens for output in outputs.values()]
                assert texts == plain.sequences[:, length:].tolist()
                continue
            if way == "forwards":
                options["output_scores"] = True  # the host's
            output = target.generate(**inputs, **options, assistant_model=draft, speculative_config=config)
            assert torch.equal(plain.sequences, output.sequences)
            if length == 9:  # steps compute nothing for padding
                assert_same_states(output[CACHE], plain[CACHE], atol=1e-2)
            metrics = hf_specdec.last_metrics()
            assert metrics.num_accepted_tokens > 0
            assert ("steps" in metrics.seconds) is (way.endswith("steps") and family != "kimi_linear")


@pytest.mark.filterwarnings("error:.*could not be")
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "bamba", "jamba", "mamba2", "kimi_linear"])
def test_drafts_with_states(family: str) -> None:
    """They accept in captured steps and forwards what they accept by the host's, but near the end."""
    target, draft = copy.deepcopy(hybrid(family)).cuda(), noisy_copy(hybrid(family), 0.03).cuda()
    inputs = {name: value.cuda() for name, value in prompts(3, 14, padding=True).items()}
    options = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(**inputs, **options)
    for tree in TREES:
        accepted = []
        for way in ("host", "steps", "forwards"):
            config = SpeculativeConfig(tree=tree, cuda_graphs="auto" if way != "host" else False)
            given = dict(options)
            if way == "forwards":  # a processor of its own is the host's
                given["logits_processor"] = LogitsProcessorList([lambda ids, scores: scores])
            text = target.generate(**inputs, **given, assistant_model=draft, speculative_config=config)
            assert torch.equal(text, plain)
            metrics = hf_specdec.last_metrics()
            accepted.append([row[:6] for row in metrics.accepted_per_step])
            assert ("steps" in metrics.seconds) is (way == "steps" and family != "kimi_linear")
        assert accepted[0] == accepted[1] == accepted[2] and sum(map(sum, accepted[0])) > 0


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_whole_steps_of_experts(family: str, dtype: torch.dtype, experts: str) -> None:
    """As they are, only "grouped_mm" of bfloat16 could be captured. In bfloat16 texts may differ by rounding."""
    target, draft = pair(0.05, family, dtype=dtype)
    for model in (target, draft):
        model.set_experts_implementation(experts)
    for length in (9, 14):
        inputs = {name: value.cuda() for name, value in prompts(2, length, padding=True).items()}
        options = {"max_new_tokens": 30, "do_sample": False}
        plain = target.generate(**inputs, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* could not be captured")
            output = target.generate(**inputs, **options, assistant_model=draft, tree=TREES[1])
        assert dtype != torch.float32 or torch.equal(plain, output)
        metrics = hf_specdec.last_metrics()
        assert "steps" in metrics.seconds and metrics.num_accepted_tokens > 0
        assert target.config._experts_implementation == experts


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_prompts_by_graphs(family: str) -> None:
    """Of lengths between the widths of the graphs; three calls each: eager, captured, replayed."""
    target, draft = pair(0.05, family, dtype=torch.float32)
    for length in (1, 40, 64, 100, 128, 200):
        for seed in range(3):
            inputs = {name: value.cuda() for name, value in prompts(1, length, seed=seed).items()}
            plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
            text = target.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=draft, tree=TREES[0])
            assert torch.equal(plain, text)


def test_whole_steps_of_heads() -> None:
    target, head = copy.deepcopy(trained_target()).cuda(), trained_head().cuda()
    for rows in (1, 3, 1):
        inputs, options = golden_inputs(rows), {"max_new_tokens": 40, "do_sample": False}
        text = target.generate(**inputs, assistant_model=head, tree=GOLDEN_TREE, **options)
        assert "steps" in hf_specdec.last_metrics().seconds
        assert torch.equal(text, target.generate(**inputs, **options))
        assert hf_specdec.last_metrics().mean_acceptance_length > 1.5


@pytest.mark.parametrize(
    "kind, dtype", [("model", torch.float32), ("head", torch.float32), ("model", torch.bfloat16)], ids=str
)
def test_compiled_steps(
    kind: str, dtype: torch.dtype, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Inductor rounds otherwise: what counts is that nearly all tokens of a trained target come out the same. In half
    precision linear layers are merged.
    """
    merged = noted_merges(monkeypatch, on_cpu=False)
    target = copy.deepcopy(trained_target()).to("cuda", dtype)
    draft = (noisy_copy(trained_target(), 0.02) if kind == "model" else trained_head()).to("cuda", dtype)
    config = hf_specdec.SpeculativeConfig(tree="[(0,), (1,), (0, 0)]", compile=True)
    inputs, options = golden_inputs(3), {"max_new_tokens": 40, "do_sample": False}
    for _ in range(2):
        text = target.generate(**inputs, **options, assistant_model=draft, speculative_config=config)
        assert "steps" in hf_specdec.last_metrics().seconds and hf_specdec.last_metrics().num_accepted_tokens > 0
        assert (text == target.generate(**inputs, **options)).float().mean() > 0.9
    assert not [str(one.message) for one in recwarn if "could not be" in str(one.message)]
    assert (3 in merged) == (dtype == torch.bfloat16)


@pytest.mark.parametrize(
    "drawn",
    [{"draft_sampling": "greedy"}, {}, {"tree": hf_specdec.DynamicTree(depth=2, top_k=2, num_nodes=3)}],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        ALL_SETTINGS["all filters"] | {"suppress_tokens": [4]},
        ALL_SETTINGS["biases"] | {"temperature": 1.5},
    ],
    ids=str,
)
def test_whole_steps_that_draw(options: dict[str, Any], drawn: dict[str, Any]) -> None:
    """The second tokens of 40,000 rows, drawn in a step, against the target's own probabilities; and seeds."""
    target, draft = pair(0.3, vocab_size=12, dtype=torch.float32)
    ids = torch.tensor([[3, 5, 7, 4]], device="cuda").expand(20_000, -1)
    config = hf_specdec.SpeculativeConfig(**({"tree": "[(0,), (1,), (0, 0)]"} | drawn))
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=3,
            do_sample=True,
            eos_token_id=None,
            assistant_model=draft,
            speculative_config=config,
            **({"top_k": 0} | options),
        )
        assert "steps" in hf_specdec.last_metrics().seconds
        found.append(output)
    assert torch.equal(*found)
    warpers = target._get_logits_processor(
        target._prepare_generation_config(None, do_sample=True, **({"top_k": 0} | options))[0], device="cuda"
    )
    for first in output[:, 4].unique().tolist():
        chosen = output[output[:, 4] == first]
        if len(chosen) < 2000:
            continue
        with torch.no_grad():
            expected = warpers(chosen[:1, :5], target(chosen[:1, :5]).logits[:, -1].float())[0].softmax(-1)
        counts = torch.bincount(chosen[:, 5], minlength=12) / len(chosen)
        assert (counts - expected).abs().sum() / 2 < 5 * (12 / (6.28 * len(chosen))) ** 0.5


@pytest.mark.parametrize("draft_sampling", ["greedy", "sample"])
def test_sampled_first_tokens_have_the_targets_distribution(draft_sampling: str) -> None:
    """
    The second token of 40,000 rows, given the first, against the target's own probabilities: on CUDA the tokens of all
    nodes are drawn at once.
    """
    target, draft = pair(0.3, vocab_size=12)
    rows = 40_000
    ids = torch.tensor([[3, 5, 7, 4]], device="cuda").expand(rows, -1)
    config = hf_specdec.SpeculativeConfig(tree="[(0,), (1,), (0, 0)]", draft_sampling=draft_sampling)
    output = target.generate(
        ids, max_new_tokens=3, do_sample=True, top_k=0, assistant_model=draft, speculative_config=config
    )
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    for first in output[:, 4].unique().tolist():
        chosen = output[output[:, 4] == first]
        if len(chosen) < 2000:
            continue
        with torch.no_grad():
            expected = target(chosen[:1, :5]).logits[0, -1].softmax(-1)
        counts = torch.bincount(chosen[:, 5], minlength=12) / len(chosen)
        # Expected total variation of a correct sampler is below sqrt(12 / (2 pi n)); five times that is never reached.
        assert (counts - expected).abs().sum() / 2 < 5 * (12 / (6.28 * len(chosen))) ** 0.5


def test_inputs_on_the_cpu_work_as_in_plain_generate() -> None:
    target = tiny_model().cuda()
    inputs = prompts(2, 9, padding=True)
    try:
        plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    except RuntimeError:
        pytest.skip("this version of transformers does not take them either")
    output = target.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=hf_specdec.NgramDraft(3, 1))
    assert torch.equal(plain.cpu(), output.cpu())


def test_a_seed_reproduces_a_run() -> None:
    target, draft = pair(0.2)
    inputs = {name: value.cuda() for name, value in prompts(2, 9).items()}

    def run() -> torch.Tensor:
        torch.manual_seed(5)
        return target.generate(**inputs, max_new_tokens=30, do_sample=True, assistant_model=draft, tree="[(0,), (1,)]")

    assert torch.equal(run(), run())


# --------------------------------------------------------------------------------------------------------------- heads


GOLDEN_TREE = hf_specdec.DynamicTree(depth=5, top_k=4, num_nodes=19)


def golden_inputs(rows: int = 1) -> dict[str, torch.Tensor]:
    found = [prompt[:12] for prompt in trained_prompts()["prompts"] if len(prompt) >= 12][:rows]
    ids = torch.tensor(found, device="cuda")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", ["safeailab_eagle1", "safeailab_eagle3"])
def test_heads_accept_what_the_reference_accepts(name: str) -> None:
    about = json.loads((GOLDENS / name / "golden.json").read_text())
    ids = load_file(GOLDENS / name / "golden.safetensors")["input_ids"].cuda()
    target, head = copy.deepcopy(trained_target()).cuda(), trained_head(name).cuda()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 64, "do_sample": False}
    plain, expected = target.generate(ids, **options), about["results"]["accepted_drafts"]
    for _ in range(4):  # from the third time on, the head reads the prompt by a graph
        text = target.generate(ids, assistant_model=head, tree=GOLDEN_TREE, **options)
        assert hf_specdec.last_metrics().accepted_per_step[0][: len(expected)] == expected
        assert torch.equal(text, plain)


@pytest.mark.parametrize("head_device", ["cuda", "cpu"])
@pytest.mark.parametrize("tree", [None, "auto", "[(0,), (1,), (0, 0)]"])
def test_heads_in_batches(tree: Any, head_device: str) -> None:
    """Also a head that was left on the CPU."""
    target, head = copy.deepcopy(trained_target()).cuda(), trained_head().to(head_device)
    inputs, options = golden_inputs(3), {"max_new_tokens": 40, "do_sample": False}
    text = target.generate(**inputs, assistant_model=head, tree=tree, **options)
    assert torch.equal(text, target.generate(**inputs, **options))
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_heads_in_half_precision(do_sample: bool) -> None:
    target = copy.deepcopy(trained_target()).to(torch.bfloat16).cuda()
    head = hf_specdec.EagleHead.from_pretrained(GOLDENS / "safeailab_eagle3").cuda()
    target.generate(**golden_inputs(3), assistant_model=head, max_new_tokens=40, do_sample=do_sample)
    assert hf_specdec.last_metrics().mean_acceptance_length > 1.5


def test_medusa_heads() -> None:
    target = copy.deepcopy(trained_target()).cuda()
    heads = hf_specdec.MedusaHeads.from_pretrained(GOLDENS / "medusa").cuda()
    inputs, options = golden_inputs(3), {"max_new_tokens": 40, "do_sample": False}
    for tree in (None, "[(0,), (1,), (0, 0), (0, 1, 0), (0, 1)]"):
        text = target.generate(**inputs, assistant_model=heads, tree=tree, **options)
        assert torch.equal(text, target.generate(**inputs, **options))
        assert hf_specdec.last_metrics().mean_acceptance_length > 1.5
