"""Heads in `generate` calls: kinds of targets and inputs, batches and load, threads, what is left behind, refusals."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import vision
from support.goldens import trained_prompts, trained_target
from support.heads import (
    GOLDENS,
    WIDE,
    RecordingDrafter,
    assert_drafts_as_from_scratch,
    chain_from_scratch,
    features_of,
    pads_of,
    tiny_head,
    trained_head,
)
from support.models import FAMILIES, VOCAB, prompts, tiny_model
from support.parity import IRREGULAR, assert_same_text, plain_text
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria

import hf_specdec
from hf_specdec import EagleHead, SpeculativeConfig, TokenTree
from hf_specdec.cache import TreeCache
from hf_specdec.drafters.heads import in_dtype_of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(2)
def test_targets_of_every_family(family: str) -> None:
    target = tiny_model(family)
    number = target.config.get_text_config().num_hidden_layers
    drafter = RecordingDrafter(tiny_head(target, aux_layer_ids=[0, 1, number]))
    inputs = prompts(3, 15, padding=True)
    text = target.generate(**inputs, assistant_model=drafter, tree=WIDE, do_sample=False, max_new_tokens=20)
    assert text.tolist() == plain_text(target, inputs, max_new_tokens=20).tolist()
    assert_drafts_as_from_scratch(drafter, target, text, pads_of(inputs))


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl"])
def test_images(name: str) -> None:
    target, inputs = getattr(vision, name)(), getattr(vision, f"{name}_inputs")(1, padding=False)
    drafter = RecordingDrafter(tiny_head(target, aux_layer_ids=[0, 1, 1]))
    text = target.generate(**inputs, assistant_model=drafter, tree=WIDE, do_sample=False, max_new_tokens=16)
    assert text.tolist() == plain_text(target, inputs, max_new_tokens=16).tolist()
    types = ("token_type_ids", "mm_token_type_ids")
    others = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask", *types)}
    for draft, (length,) in list(zip(drafter.trees, drafter.lengths, strict=True))[:6]:
        ids = text[:, : length - 1]
        grown = {key: F.pad(inputs[key], (0, ids.shape[1] - inputs[key].shape[1])) for key in types if key in inputs}
        features = features_of(drafter.head, target, input_ids=ids, **others, **grown)
        expected = chain_from_scratch(drafter.head, target, features, text[0, 1:length], 2)
        assert draft.tokens[0, [0, WIDE.children[1][0] - 1]].tolist() == expected


def test_inputs_that_are_no_tokens() -> None:
    """The head knows no tokens before the first generated one: its rows begin with the last feature before that."""
    target = tiny_model("llama", seed=1)
    drafter = RecordingDrafter(tiny_head(target))
    inputs = prompts(2, 9, padding=True)
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    text = target.generate(**given, assistant_model=drafter, tree=WIDE, do_sample=False, max_new_tokens=20)
    assert text.tolist() == plain_text(target, given, max_new_tokens=20).tolist()
    for row, pads in enumerate(pads_of(inputs)):
        for draft, lengths in list(zip(drafter.trees, drafter.lengths, strict=True))[:4]:
            length = lengths[row]
            ids = torch.cat([inputs["input_ids"][row, pads:], text[row, :length]])[None, :-1]
            first = embeds.shape[1] - pads - 1
            features = features_of(drafter.head, target, input_ids=ids)[:, first:]
            expected = chain_from_scratch(drafter.head, target, features, text[row, :length], 2, first=first)
            assert draft.tokens[row, [0, WIDE.children[1][0] - 1]].tolist() == expected


def test_several_turns_on_one_cache() -> None:
    """What the cache held before has no features: the head's rows begin with the turn."""
    target = tiny_model("llama", seed=1)
    ids, caches = prompts(1, 10)["input_ids"], [DynamicCache(config=target.config) for _ in range(2)]
    known = 0
    for turn in range(3):
        drafter = RecordingDrafter(tiny_head(target))
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
        plain = target.generate(ids, past_key_values=caches[0], **options)
        ours = target.generate(ids, past_key_values=caches[1], assistant_model=drafter, tree=WIDE, **options)
        assert ours.tolist() == plain.tolist()
        for draft, (length,) in list(zip(drafter.trees, drafter.lengths, strict=True))[:4]:
            features = features_of(drafter.head, target, input_ids=ours[:, : length - 1])[:, known:]
            expected = chain_from_scratch(drafter.head, target, features, ours[0, known + 1 : length], 2, first=known)
            assert draft.tokens[0, [0, WIDE.children[1][0] - 1]].tolist() == expected
        known = ours.shape[1] - 1
        ids = torch.cat([ours, prompts(1, 3, seed=turn)["input_ids"]], dim=1)


def accepted_by(assistant: Any, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": 40, "tree": IRREGULAR} | options
    trained_target().generate(**inputs, assistant_model=assistant, **options)
    return hf_specdec.last_metrics().accepted_per_step


def trained_inputs(rows: int, length: int = 12) -> dict[str, torch.Tensor]:
    found = [prompt[:length] for prompt in trained_prompts()["prompts"] if len(prompt) >= length]
    ids = torch.tensor(found[:rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class RunsTheTarget(StoppingCriteria):
    """Never stops, and has the target read the text every time."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        trained_target()(input_ids[:, -3:])
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_others_run_the_target_meanwhile(rows: int) -> None:
    """Features are those of the call's own forwards."""
    inputs, head = trained_inputs(rows), trained_head()
    assert accepted_by(head, inputs, stopping_criteria=[RunsTheTarget()]) == accepted_by(head, inputs)
    options = {"guidance_scale": 1.5, "max_new_tokens": 30}
    assert_same_text(trained_target(), inputs, head, **options)


@pytest.mark.slow
def test_offloaded_targets() -> None:
    """Embeddings and lm_head are loaded when they are called."""
    accelerate = pytest.importorskip("accelerate")
    for name in ("safeailab_eagle1", "safeailab_eagle3"):
        inputs, head = trained_inputs(1), trained_head(name)
        expected = accepted_by(head, inputs)
        target = accelerate.cpu_offload(copy.deepcopy(trained_target()), execution_device=torch.device("cpu"))
        target.generate(**inputs, assistant_model=head, do_sample=False, max_new_tokens=40, tree=IRREGULAR)
        assert hf_specdec.last_metrics().accepted_per_step == expected


@pytest.mark.parametrize("disable_by_batch_size", [0, 1, 2])
@pytest.mark.some_cases(1)
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


def test_a_head_alone_picks_its_tree(default_trees: None) -> None:
    target, head = trained_target(), trained_head()
    ids = torch.tensor([trained_prompts()["prompts"][1]])
    text = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, max_new_tokens=30)
    assert text.tolist() == target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30).tolist()
    assert hf_specdec.last_metrics().mean_acceptance_length > 2
    head.config.default_tree = "[(0,)]"
    target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=head, max_new_tokens=30)
    metrics = hf_specdec.last_metrics()
    assert metrics.num_draft_tokens <= metrics.num_drafts


def test_runs_in_the_targets_dtype_unless_told(default_trees: None) -> None:
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


def test_a_copy_in_another_dtype_follows_its_head() -> None:
    inputs = trained_inputs(1)
    head = EagleHead.from_pretrained(GOLDENS / "specforge_eagle3")
    assert sum(accepted_by(head, inputs)[0]) > 10
    converted = in_dtype_of(head, trained_target())
    assert converted.dtype == torch.float32 and converted.config is head.config
    assert in_dtype_of(head, trained_target()) is converted
    head.config.default_tree = "[(0,)]"
    with torch.no_grad():
        head.lm_head.weight.zero_()
    assert sum(accepted_by(head, inputs)[0]) == 0
    assert len(pickle.dumps(head)) < 1.5 * sum(p.nbytes for p in head.parameters())
    wide = EagleHead.from_pretrained(GOLDENS / "safeailab_eagle3")
    converted = in_dtype_of(wide, copy.deepcopy(trained_target()).to(torch.bfloat16))
    assert converted.dtype == torch.bfloat16
    assert torch.equal(converted.rotary_emb.inv_freq, wide.rotary_emb.inv_freq)
    assert converted.rotary_emb.inv_freq.dtype == torch.float32


def test_nothing_of_a_call_waits_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []

    class Watched(TreeCache):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            caches.append(weakref.ref(self))

    monkeypatch.setattr("hf_specdec.generation.target.TreeCache", Watched)
    monkeypatch.setattr("hf_specdec.drafters.features.drafter.TreeCache", Watched)
    gc.collect()
    gc.disable()
    try:
        accepted_by(trained_head(), trained_inputs(2))
        assert len(caches) == 2
        assert [cache() for cache in caches] == [None, None]
    finally:
        gc.enable()


def test_suppressed_tokens_of_a_draft_vocabulary() -> None:
    """The processor names the target's tokens; the head's logits have columns of its own."""
    target, head = tiny_model("llama"), tiny_head(tiny_model("llama"), draft_vocab_size=30)
    suppressed = head.target_ids[::2].tolist()
    drafter = RecordingDrafter(head)
    target.generate(
        **prompts(2, 9),
        assistant_model=drafter,
        tree=TokenTree.from_branching((6, 2)),
        do_sample=True,
        top_k=0,
        suppress_tokens=suppressed,
        max_new_tokens=12,
    )
    drafted = {token for draft in drafter.trees for row in draft.tokens_list for token in row if token >= 0}
    assert len(drafted) > 8
    assert not drafted & set(suppressed)


@pytest.mark.parametrize("of", ["target", "head"])
def test_models_made_in_inference_mode(of: str) -> None:
    """Their tensors have no version that tells of changes."""
    ids = torch.tensor([trained_prompts()["prompts"][1]])
    with torch.inference_mode(of == "target"):
        target = tiny_model("llama")
    with torch.inference_mode(of == "head"):  # borrows rows of the lm_head; its dtype is not the target's
        head = tiny_head(target, draft_vocab_size=32, has_lm_head=False).float()
    assert_same_text(target, {"input_ids": ids % VOCAB, "attention_mask": torch.ones_like(ids)}, head)


def test_leaves_the_target_as_it_was() -> None:
    target, head = trained_target(), trained_head()

    class Raising(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls > 3:
                raise RuntimeError("in a processor")
            return scores

    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())

    ids, before = torch.tensor([trained_prompts()["prompts"][1]]), hooks()
    with pytest.raises(RuntimeError, match="in a processor"):
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=head,
            tree=IRREGULAR,
            logits_processor=LogitsProcessorList([Raising()]),
        )
    assert hooks() == before
    assert target.config._attn_implementation == head.config.text_config._attn_implementation == "sdpa"


@pytest.mark.slow
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
