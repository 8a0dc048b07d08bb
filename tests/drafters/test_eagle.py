"""
Drafting with EAGLE heads: the references' own trees and acceptance; and whatever the rows, the batches and the steps
without drafts, the trees that a head would propose for that text from scratch.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import vision
from support.goldens import TINY_TARGET, trained_prompts, trained_target
from support.heads import RecordingDrafter, tiny_head
from support.models import VOCAB, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, EagleHead, SpeculativeConfig, TokenTree


GOLDENS = TINY_TARGET.parent
EAGLE3 = GOLDENS / "safeailab_eagle3"


def golden(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(GOLDENS / name / "golden.safetensors"), json.loads((GOLDENS / name / "golden.json").read_text())


def trained_head(name: str = "safeailab_eagle3", **options: Any) -> EagleHead:
    return EagleHead.from_pretrained(GOLDENS / name, dtype=torch.float32, **options)


# ------------------------------------------------------------------------------------------------------------- goldens


@pytest.mark.parametrize("name", ["safeailab_eagle1", "safeailab_eagle3"])
def test_the_references_own_trees(name: str) -> None:
    """Every dynamic tree of the reference's run, node by node, what of it is accepted, and the output."""
    arrays, about = golden(name)
    drafter = RecordingDrafter(trained_head(name))
    # SafeAILab counts the root, and one level less.
    tree = DynamicTree(depth=about["settings"]["depth"] + 1, top_k=4, num_nodes=about["settings"]["total_token"] - 1)
    ids = arrays["input_ids"]
    text = trained_target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        tree=tree,
        max_new_tokens=64,
        do_sample=False,
    )
    steps = len(arrays["eagenerate_accept_length"])
    for step in range(steps):
        draft = drafter.trees[step]
        assert draft.tokens[0].tolist() == arrays["step_draft_tokens"][step, 1:].tolist()
        assert draft.topology.parents[0, 1:].tolist() == arrays["step_parents"][step, 1:].tolist()
        assert draft.topology.depths[0].tolist() == arrays["step_position_ids"][step].tolist()
    accepted = hf_specdec.last_metrics().accepted_per_step[0]
    assert accepted[:steps] == arrays["eagenerate_accept_length"].tolist() == about["results"]["accepted_drafts"]
    length = arrays["eagenerate_ids"].shape[1]
    assert text[0, :length].tolist() == arrays["eagenerate_ids"][0].tolist()
    assert text[0, : arrays["greedy_ids"].shape[1]].tolist() == arrays["greedy_ids"][0].tolist()


@pytest.mark.parametrize(
    "name, options",
    [
        ("speculators_eagle3", {}),
        ("specforge_eagle3", {}),
        ("modelopt_eagle3", {}),
        ("modelopt_eagle3", {"norm_hidden_twice": False}),
        ("modelopt_eagle3_yarn", {}),
        ("modelopt_eagle3_yarn", {"norm_hidden_twice": False}),
    ],
)
def test_the_references_own_chains(name: str, options: dict[str, Any]) -> None:
    """Every chain of 4 that the references draft along the text, and what is accepted."""
    arrays, _ = golden(name)
    suffix = "_singlenorm" if options else ""
    drafter = RecordingDrafter(trained_head(name, **options))
    ids = arrays["input_ids"]
    trained_target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        tree=TokenTree.chain(4),
        max_new_tokens=64,
        do_sample=False,
    )
    steps = len(arrays["spec_accept_length" + suffix])
    found = [draft.tokens[0].tolist() for draft in drafter.trees[:steps]]
    assert found == arrays["spec_draft_tokens" + suffix].tolist()
    # A length counts the root here, the references' does not.
    assert [lengths[0] - 1 for lengths in drafter.lengths[:steps]] == arrays["spec_prefix_len" + suffix].tolist()
    accepted = hf_specdec.last_metrics().accepted_per_step[0]
    assert accepted[:steps] == arrays["spec_accept_length" + suffix].tolist()


# ------------------------------------------------------------------------------------- the same trees as from scratch


def chains_from_scratch(head: EagleHead, target: PreTrainedModel, text: torch.Tensor, count: int) -> list[int]:
    """
    The chain of `count` tokens that the head drafts behind `text` (`[tokens]`, the root last): one forward of the
    target, one of the head over all rows, then one row after the other.
    """
    from hf_specdec.features import watch_features

    with torch.no_grad():
        boundaries = head.config.aux_boundaries(target.config.num_hidden_layers)
        with watch_features(target, boundaries) as features:
            target(text[None, :-1])
        cache, lm_head = DynamicCache(), target.get_output_embeddings()
        embed = head.embed_tokens or target.get_input_embeddings()
        inputs = {"features": features.take(target.device, target.dtype)}
        tokens, chain = text[None, 1:], []
        for _ in range(count):
            output = head(inputs_embeds=embed(tokens), past_key_values=cache, lm_head=lm_head, **inputs)
            best = int(output.logits[0, -1].argmax())
            chain.append(best if head.target_ids is None else int(head.target_ids[best]))
            tokens, inputs = torch.tensor([[chain[-1]]]), {"hidden_states": output.hidden_states[:, -1:]}
    return chain


HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "draft vocabulary": {"draft_vocab_size": 40},
    "eagle1": {"eagle_version": 1},
    "eagle1, bias": {"eagle_version": 1, "fc_bias": True},
    "last hidden state": {"num_aux_features": 0, "aux_layer_ids": None, "has_fc": False},
    "two features": {"aux_layer_ids": [1, 2]},
    "own embeddings": {"has_embeddings": True},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "norm before fc": {"norm_before_fc": True, "norm_hidden_twice": True},
    "two layers": {"layers": {"num_hidden_layers": 2}},
    "qwen3": {"layers": {"model_type": "qwen3"}},
    "qwen2": {"layers": {"model_type": "qwen2"}},
    "window": {"layers": {"sliding_window": 6, "layer_types": ["sliding_attention"]}},
    "yarn": {
        "layers": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        }
    },
}


@pytest.mark.parametrize("kind", HEADS)
def test_every_step_drafts_as_from_scratch(kind: str) -> None:
    """Over a ragged batch with padding: what is in the head's cache is what the text alone would put there."""
    target = tiny_model("llama", seed=1)
    head = tiny_head(target, **HEADS[kind])
    drafter = RecordingDrafter(head)
    inputs = prompts(3, 9, padding=True)
    tree = TokenTree.from_branching((12, 2))  # so wide that a random head hits now and then
    text = target.generate(**inputs, assistant_model=drafter, tree=tree, do_sample=False, max_new_tokens=20)
    assert text.tolist() == plain_text(target, inputs, max_new_tokens=20).tolist()
    metrics = hf_specdec.last_metrics()
    assert len({tuple(row) for row in metrics.accepted_per_step}) > 1, "the batch is not ragged"
    assert metrics.num_accepted_tokens > 3
    compared = 0
    for draft, lengths in zip(drafter.trees, drafter.lengths, strict=True):
        first_path = [0, tree.children[1][0] - 1]
        for row, length in enumerate(lengths):
            if draft.topology.depth < tree.depth or draft.num_valid(row) < draft.num_nodes:
                continue  # at the end of the text
            pads = int((inputs["attention_mask"][row] == 0).sum())
            expected = chains_from_scratch(head, target, text[row, pads:length], 2)
            assert draft.tokens[row, first_path].tolist() == expected
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("prefill_chunk_size", [None, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_order_of_steps_does_not_matter(batch_size: int, prefill_chunk_size: int | None) -> None:
    """A batch accepts, row by row, what each row accepts alone."""
    target, head = trained_target(), trained_head()
    ids = torch.tensor([prompt[:12] for prompt in trained_prompts()["prompts"] if len(prompt) >= 12][:3])
    tree = DynamicTree(depth=4, top_k=3, num_nodes=10)
    options = {"max_new_tokens": 40, "prefill_chunk_size": prefill_chunk_size}
    alone = []
    for row in ids:
        inputs = {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
        assert_same_text(target, inputs, head, tree, **options)
        alone.append(hf_specdec.last_metrics().accepted_per_step[0])
    if batch_size > 1:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        metrics = assert_same_text(target, inputs, head, tree, **options)
        assert metrics.accepted_per_step == alone


def test_catches_up_after_steps_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few waiting rows allowed and with many, the trees behind a pause are those of a call without one."""
    target, head = trained_target(), trained_head()
    ids = torch.tensor([trained_prompts()["prompts"][0][:12]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tree = TokenTree.from_branching((2, 2))

    class Pausing(RecordingDrafter):
        def propose(self, sequences):
            return None if 20 <= sequences.lengths[0] < 40 else super().propose(sequences)

    never, pausing = RecordingDrafter(head), Pausing(head)
    text = target.generate(**inputs, assistant_model=never, tree=tree, do_sample=False, max_new_tokens=60)
    monkeypatch.setattr("hf_specdec.drafters.eagle.LONGEST_FORWARD", 7)
    drafted = {lengths[0]: draft.tokens for draft, lengths in zip(never.trees, never.lengths, strict=True)}
    paused = target.generate(**inputs, assistant_model=pausing, tree=tree, do_sample=False, max_new_tokens=60)
    assert paused.tolist() == text.tolist()
    compared = [
        torch.equal(draft.tokens, drafted[lengths[0]])
        for draft, lengths in zip(pausing.trees, pausing.lengths, strict=True)
        if lengths[0] >= 40 and lengths[0] in drafted
    ]
    assert len(compared) > 3 and all(compared)
    assert not any(20 <= lengths[0] < 40 for lengths in pausing.lengths)


# ------------------------------------------------------------------------------------------------- in `generate` calls


FAMILIES = ["qwen3", "gemma2", "gemma3_text", "mistral", "mixtral", "gpt2", "falcon", "gptj", "gpt_oss"]


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_every_family(family: str) -> None:
    target = tiny_model(family)
    layers = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    head = tiny_head(target, layers=layers, aux_layer_ids=[0, 1, target.config.get_text_config().num_hidden_layers])
    inputs = prompts(3, 15, padding=True)
    assert_same_text(target, inputs, head, tree=TokenTree.from_branching((16, 1)), max_new_tokens=24)


def test_inputs_that_are_no_tokens() -> None:
    target = tiny_model("llama", seed=1)
    head = tiny_head(target)
    inputs = prompts(2, 9, padding=True)
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    assert_same_text(target, inputs, head, tree=TokenTree.from_branching((16, 1)), max_new_tokens=24)


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl"])
def test_images(name: str) -> None:
    target, inputs = getattr(vision, name)(), getattr(vision, f"{name}_inputs")(2, padding=True)
    head = tiny_head(target, aux_layer_ids=[0, 1, 1])
    assert_same_text(target, inputs, head, tree=TokenTree.from_branching((16, 1)), max_new_tokens=16)


def test_several_turns_on_one_cache() -> None:
    """What the cache held before has no features: less is accepted, and the text is the same."""
    target, head = trained_target(), trained_head()
    ids = torch.tensor([trained_prompts()["prompts"][0][:10]])
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    for _ in range(3):
        mask = torch.ones_like(ids)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20}
        plain = target.generate(ids, past_key_values=caches[0], **options)
        ours = target.generate(ids, past_key_values=caches[1], assistant_model=head, **options)
        assert ours.tolist() == plain.tolist()
        assert hf_specdec.last_metrics().mean_acceptance_length > 1.5
        ids = torch.cat([ours, torch.tensor([[7, 9, 11]])], dim=1)


@pytest.mark.parametrize("disable_by_batch_size", [0, 1, 2])
def test_disabled_by_load(disable_by_batch_size: int) -> None:
    target, head = trained_target(), trained_head()
    ids = torch.tensor([prompt[:12] for prompt in trained_prompts()["prompts"] if len(prompt) >= 12][:3])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = plain_text(target, inputs, max_new_tokens=40)
    end = int(expected[0, 20])  # the first row ends early
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": end, "pad_token_id": 0}
    config = SpeculativeConfig(tree=TokenTree.chain(3), disable_by_batch_size=disable_by_batch_size)
    ours = target.generate(**inputs, assistant_model=head, speculative_config=config, **options)
    assert ours.tolist() == target.generate(**inputs, **options).tolist()


def test_a_head_alone_picks_its_tree() -> None:
    target, head = trained_target(), trained_head()
    ids = torch.tensor([trained_prompts()["prompts"][1]])
    text = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, max_new_tokens=30)
    assert text.tolist() == target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30).tolist()
    assert hf_specdec.last_metrics().mean_acceptance_length > 2
    head.config.default_tree = "[(0,)]"
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, max_new_tokens=30)
    metrics = hf_specdec.last_metrics()
    assert metrics.num_draft_tokens <= metrics.num_drafts


def test_runs_in_the_targets_dtype_unless_told() -> None:
    ids = torch.tensor([trained_prompts()["prompts"][1]])
    head = EagleHead.from_pretrained(GOLDENS / "specforge_eagle3")  # bfloat16 on disk
    target = trained_target()
    for _ in range(2):
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, max_new_tokens=30)
    in_float32 = hf_specdec.last_metrics().accepted_per_step
    assert head.dtype == torch.bfloat16
    as_told = EagleHead.from_pretrained(GOLDENS / "specforge_eagle3", dtype=torch.float32)
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=as_told, max_new_tokens=30)
    assert hf_specdec.last_metrics().accepted_per_step == in_float32
    told = EagleHead.from_pretrained(GOLDENS / "specforge_eagle3", dtype=torch.bfloat16)
    assert_same_text(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, told, max_new_tokens=30)


def test_leaves_the_target_as_it_was() -> None:
    target, head = trained_target(), trained_head()

    class Raising(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls > 3:
                raise RuntimeError("in a processor")
            return scores

    ids = torch.tensor([trained_prompts()["prompts"][1]])
    with pytest.raises(RuntimeError, match="in a processor"):
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=head,
            tree=IRREGULAR,
            logits_processor=LogitsProcessorList([Raising()]),
        )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    assert target.config._attn_implementation == head.config.text_config._attn_implementation == "sdpa"


def test_two_threads_on_one_target_and_head() -> None:
    target, head = trained_target(), trained_head()
    rows = trained_prompts()["prompts"][:6]
    options = {"do_sample": False, "max_new_tokens": 40}
    expected, accepted, found = {}, {}, {}

    def run(number: int, texts: dict, lengths: dict) -> None:
        ids = torch.tensor([rows[number]])
        texts[number] = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=head, tree=IRREGULAR, **options
        ).tolist()
        lengths[number] = hf_specdec.last_metrics().accepted_per_step

    for number in range(len(rows)):
        run(number, expected, accepted)
    lengths = {}
    threads = [threading.Thread(target=run, args=(number, found, lengths)) for number in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert lengths == accepted


# ------------------------------------------------------------------------------------------------------------ refusals


def refused(target: PreTrainedModel, head: EagleHead, match: str, **options: Any) -> None:
    def forward(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a forward ran")

    handles = [module.register_forward_pre_hook(forward) for module in (target, head)]
    inputs = prompts(1, 5)
    with pytest.raises(ValueError, match=match):
        target.generate(**inputs, assistant_model=head, max_new_tokens=4, **options)
    for handle in handles:
        handle.remove()


def test_refusals() -> None:
    target = tiny_model("llama")
    refused(target, tiny_head(tiny_model("llama", vocab_size=VOCAB + 1)), f"vocabulary of {VOCAB + 1} tokens.*{VOCAB}")
    refused(target, tiny_head(tiny_model("llama", hidden_size=64)), "hidden states of size 64.*have 32")
    refused(target, tiny_head(target, aux_layer_ids=[0, 1, 3]), r"aux_layer_ids.*\[0, 1, 3\].*2 layers")
    narrow = tiny_head(tiny_model("llama", hidden_size=64), target_hidden_size=32)
    refused(target, narrow, "hidden size 64 and no token embeddings")
    head = tiny_head(target, draft_vocab_size=5)
    refused(target, head, "rank 5.*5 tokens", tree="[(0,), (5,)]")


def test_a_compiled_target_whose_hooks_do_not_run() -> None:
    """What the hooks did not see is an error, not a wrong draft."""
    target = tiny_model("llama")
    head = tiny_head(target)
    layers = target.model.layers
    for layer in layers:
        layer.__class__ = type("Unhooked", (type(layer),), {"__call__": type(layer).forward})
    with pytest.raises(ValueError, match="passed by the hooks"):
        target.generate(**prompts(1, 5), assistant_model=head, max_new_tokens=4)
