"""LoRA adapters by request: each text is that of plain `generate` with its adapter, whatever runs beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import vision
from support.adapters import ADAPTERS, activate, active_in, adapted, add, alone, layers_of, lora_config
from support.batches import assert_nothing_left, limits, manager_of, ragged_prompts
from support.graphs import install_stand_in
from support.heads import tiny_head
from support.models import noisy_copy, tiny_model
from torch._dynamo.utils import counters

from hf_specdec import NgramDraft, SpeculativeConfig
from hf_specdec.adapters import RequestAdapters, stacks
from hf_specdec.compiling import layers
from hf_specdec.graphs.paged import PagedGraphs


pytest.importorskip("peft", reason="adapters need peft")

CHOICES = ("a", None, "b", "c", "a", "c")
PROMPTS = ragged_prompts((9, 1, 17, 5, 12, 6))
TREE = "[(0,), (1,), (0, 0)]"


@pytest.fixture(scope="module")
def shared() -> Any:
    """A model with `ADAPTERS`; whoever changes it changes a copy."""
    return adapted()


def texts_of(model: Any, choices: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """The texts of requests with these adapters, run together."""
    options = {"tree": TREE, "continuous_batching_config": limits(), "max_new_tokens": 16} | options
    draft = options.pop("assistant_model", None) or NgramDraft(min_ngram=1)
    if choices is not ...:
        options["adapter"] = choices
    outputs = model.generate_batch(prompts, assistant_model=draft, **options).values()
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs]


def expected(model: Any, choices: Any = CHOICES, count: int = 16, **options: Any) -> list[list[int]]:
    return [
        alone(model, choice, prompt, max_new_tokens=count, **options)
        for choice, prompt in zip(choices, PROMPTS, strict=False)
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["ngram", "draft", "head"])
@pytest.mark.some_cases(2)
def test_rows_have_their_own_adapters(shared: Any, kind: str) -> None:
    drafts = {
        "ngram": lambda: None,
        "draft": lambda: noisy_copy(tiny_model(), 0.05),
        "head": lambda: tiny_head(shared),
    }
    texts = expected(shared)
    assert texts_of(shared, list(CHOICES), assistant_model=drafts[kind]()) == texts
    of_one = [alone(shared, choice, PROMPTS[0], max_new_tokens=16) for choice in (None, *ADAPTERS)]
    assert len(set(map(tuple, of_one))) == 4, "the adapters change nothing"


def test_rows_of_a_wrong_adapter_are_seen(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = expected(shared)
    monkeypatch.setattr(stacks.Stack, "_masked", lambda self, small, off: small)
    assert texts_of(shared, list(CHOICES)) != texts


@pytest.mark.parametrize("choices", [("b", "b", "b"), (None, None, None)], ids=["one", "none"])
def test_all_rows_have_the_same(shared: Any, choices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no other adapter is computed."""
    monkeypatch.setattr(stacks.Stack, "_masked", lambda *args: pytest.fail("columns of others"))
    assert texts_of(shared, list(choices), PROMPTS[:3]) == expected(shared, choices)


def test_seeds(shared: Any) -> None:
    """A sampled text is that of a model with this adapter alone, whatever runs beside it."""
    options = {"do_sample": True, "seed": 5, "max_new_tokens": 12}
    together = texts_of(shared, list(CHOICES), **options)
    for choice, prompt, text in zip(CHOICES[:3], PROMPTS, together, strict=False):
        model = copy.deepcopy(shared)
        activate(model, choice)
        assert texts_of(model, ..., [prompt], **options) == [text]


def test_active_adapters_as_before(shared: Any) -> None:
    """Requests that name none have those that are active, two of them here, beside requests that name some."""
    model = copy.deepcopy(shared)
    activate(model, ["a", "c"])
    both = [alone(model, ["a", "c"], prompt, max_new_tokens=16) for prompt in PROMPTS[:3]]
    assert texts_of(model, ..., PROMPTS[:3]) == both
    texts = texts_of(model, [..., None, "c", ...], PROMPTS[:4])
    assert texts[:3] == [both[0], *expected(model, (None, None, "c"))[1:]]
    assert active_in(model) == {("a", "c")}


@pytest.mark.parametrize(
    "family, targets",
    [
        ("gpt2", ["c_attn", "c_proj"]),
        ("qwen2_moe", ["q_proj", "shared_expert.up_proj", "shared_expert.down_proj"]),
        ("llama", ["lm_head", "k_proj"]),
    ],
    ids=["transposed", "flat rows", "lm_head"],
)
def test_layers(family: str, targets: list[str]) -> None:
    model = adapted(tiny_model(family), a={"target_modules": targets}, b={"target_modules": targets, "r": 3})
    choices = ("a", None, "b")
    texts, base = expected(model, choices, 10), expected(model, (None, None, None), 10)
    assert texts[0] != base[0] and texts[2] != base[2], "the adapters change nothing"
    assert texts_of(model, list(choices), PROMPTS[:3], max_new_tokens=10) == texts


def test_prompts_with_images() -> None:
    """Read whole, also by layers with adapters in the image encoder, beside requests with others."""
    plain = vision.VISION_MODELS["gemma3"][0]()
    model = adapted(plain, a={"target_modules": ["q_proj", "fc1"]}, b={"target_modules": ["v_proj", "fc2"]})
    prompts: list[Any] = [*vision.ragged_image_prompts("gemma3")[:2], [5, 6, 7]]
    texts = []
    for name, prompt in zip("abb", prompts, strict=True):
        activate(model, name)
        inputs = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
        text = model.generate(**inputs, do_sample=False, max_new_tokens=12)
        texts.append(text[0, inputs["input_ids"].shape[1] :].tolist())
        assert texts[-1] != plain.generate(**inputs, do_sample=False, max_new_tokens=12)[0, -12:].tolist()
    assert texts_of(model, ["a", "b", "b"], prompts, max_new_tokens=12) == texts


# ------------------------------------------------------------------------------------------------------------ captured


@pytest.mark.any_version
@pytest.mark.parametrize("kind", ["draft", "head"])
@pytest.mark.some_cases(1)
def test_captured_steps(kind: str, runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph serves every mix of adapters, of steps and of prompts."""
    install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setattr(PagedGraphs, "prompt_widths", (4, 8, 16))
    model = adapted(tiny_model(dtype=torch.float32))
    draft = noisy_copy(tiny_model(dtype=torch.float32), 0.05) if kind == "draft" else tiny_head(model).float()
    with manager_of(model, draft, tree=TREE) as manager:
        for choices in (CHOICES[:3], CHOICES[3:], "bbb", (..., None, "b")):
            texts = expected(model, ["a" if choice is ... else choice for choice in choices], 20)
            before = len(runs)
            options = {"max_new_tokens": 20, "do_sample": False}
            names = [manager.add_request(p, adapter=c, **options) for p, c in zip(PROMPTS, choices, strict=False)]
            outputs = {output.request_id: output for output in (manager.get_result(timeout=60) for _ in names)}
            assert [outputs[name].generated_tokens for name in names] == texts
            assert len(runs) - before > 4
        assert manager.engine.device_steps.prompts.stored
    assert_nothing_left(manager)


@pytest.mark.any_version
def test_captured_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that the host runs, as with n-grams."""
    stand_in = install_stand_in(monkeypatch, with_kernel=True)
    model = adapted(tiny_model(dtype=torch.float32))
    assert texts_of(model, list(CHOICES), max_new_tokens=20) == expected(model, count=20)
    assert stand_in.replays > 6


@pytest.mark.slow
def test_compiled_layers(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """All layers share what is compiled of the first one."""
    install_stand_in(monkeypatch, with_kernel=True, counts=False, dispatches=True)
    monkeypatch.setattr(layers, "COMPILER", "eager")
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    for num_layers in (2, 3):
        model = adapted(tiny_model(dtype=torch.float32, num_hidden_layers=num_layers))
        config = SpeculativeConfig(tree=TREE, compile=True)
        texts = texts_of(
            model,
            ["a", None, "c"],
            PROMPTS[:3],
            tree=None,
            speculative_config=config,
            assistant_model=noisy_copy(tiny_model(dtype=torch.float32), 0.05),
            max_new_tokens=12,
        )
        assert texts == expected(model, ("a", None, "c"), 12)
        graphs.append(counters["stats"]["unique_graphs"] - sum(graphs))
        torch._dynamo.reset()
    torch._dynamo.reset()
    assert not [one for one in recwarn if "could not be" in str(one.message)]
    assert graphs[0] == graphs[1] > 4


# ------------------------------------------------------------------------------------------------------------- refused


REFUSED = {
    "dora": ({"use_dora": True}, "DoRA"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, "no linear layer"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "tokens": ({"trainable_token_indices": [3]}, "trains"),
    "bias": ({"lora_bias": True}, "lora_bias"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    """And those beside them are served, as long as it is not active."""
    options, word = REFUSED[kind]
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(tiny_model(), lora_config(), adapter_name="a").double().eval()
    with tuned.disable_adapter():
        base = texts_of(tuned.get_base_model(), ..., PROMPTS[:1])
    of_a = texts_of(tuned.get_base_model(), ..., PROMPTS[:1])
    assert base != of_a
    tuned.add_adapter("odd", lora_config(**options))
    model = tuned.get_base_model()
    with pytest.raises(ValueError, match=f"(?s)adapter='odd'.*{word}"):
        texts_of(model, ["a", "odd"], PROMPTS[:2])
    assert texts_of(model, ["a", None], PROMPTS[:1] * 2) == [*of_a, *base]
    tuned.set_adapter("odd")
    with pytest.raises(ValueError, match="(?s)'odd' is active, and .*Activate another"):
        texts_of(model, "a", PROMPTS[:1])


def test_ia3_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    tuned = peft.get_peft_model(tiny_model(), config, adapter_name="odd").eval()
    with pytest.raises(ValueError, match="(?s)adapter='odd'.*no LoRA but ia3"):
        texts_of(tuned.get_base_model(), "odd", PROMPTS[:1])


def test_merged_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(tiny_model(), lora_config(), adapter_name="a").eval()
    tuned.merge_adapter()
    for choice in ("a", None):
        with pytest.raises(ValueError, match="'a' is merged .*unmerge_adapter"):
            texts_of(tuned.get_base_model(), choice, PROMPTS[:1])


def test_unknown_names(shared: Any) -> None:
    with pytest.raises(ValueError, match="adapter='d'` is not loaded.*Loaded: 'a', 'b', 'c'"):
        texts_of(shared, "d")
    with pytest.raises(TypeError, match="`adapter` must be the name of an adapter, or None, but is int: 3"):
        texts_of(shared, 3)
    with pytest.raises(ValueError, match="`adapter` has 2 entries for 6 requests"):
        texts_of(shared, ["a", "b"])
    with pytest.raises(ValueError, match="adapter='a'` is not loaded.*Loaded: none"):
        texts_of(tiny_model(), "a")
    assert texts_of(tiny_model(), None, PROMPTS[:1]) == texts_of(tiny_model(), ..., PROMPTS[:1])


# ----------------------------------------------------------------------------------------------- while a manager lives


def text_of(manager: Any, prompt: list[int], **options: Any) -> list[int]:
    output = manager.get_result(manager.add_request(prompt, max_new_tokens=16, do_sample=False, **options), timeout=60)
    assert output.error is None, output.error
    return output.generated_tokens


def fresh_weights(model: Any, seed: int) -> None:
    """Gives the adapter "a" other weights, where its own are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".a." in name:
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))


@pytest.mark.parametrize("pauses", [True, False], ids=["in a pause", "between requests"])
def test_adapters_that_come_and_change(pauses: bool, shared: Any) -> None:
    """A request has the weights that its adapter has when it is added."""
    model, prompt = copy.deepcopy(shared), PROMPTS[0]
    changed = copy.deepcopy(model)
    add(changed, "late", r=6, target_modules=["k_proj", "q_proj"])
    fresh_weights(changed, 1)
    texts = [alone(changed, name, prompt, max_new_tokens=16) for name in ("a", "late", None)]
    with manager_of(model, NgramDraft(min_ngram=1)) as manager:
        before = text_of(manager, prompt, adapter="a")
        assert before == alone(shared, "a", prompt, max_new_tokens=16) != texts[0]
        with manager.pause() if pauses else torch.no_grad():
            fresh_weights(model, 1)
            add(model, "late", r=6, target_modules=["k_proj", "q_proj"])
        assert [text_of(manager, prompt, adapter=name) for name in ("a", "late", None)] == texts
        with manager.pause() if pauses else torch.no_grad():
            activate(model, "late")
        assert text_of(manager, prompt) == texts[1]
    assert_nothing_left(manager)


def test_nobody_is_asked_before_a_request_has_an_adapter(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step all that wait would be."""
    monkeypatch.setattr(RequestAdapters, "error_of", lambda *args: pytest.fail("asked"))
    assert texts_of(shared, ..., PROMPTS[:1], max_new_tokens=3) == expected(shared, ("a",), 3)


def test_the_first_request_with_an_adapter_beside_one_without(shared: Any) -> None:
    """Added while a step runs, both before the run ends in which no request has chosen an adapter."""
    manager = manager_of(shared, NgramDraft(min_ngram=1))
    adapters = manager.engine.target.adapters
    adapters.renew()
    for choice in ("b", ...):
        adapters.check(choice)
    assert adapters.is_stale


def test_padding_rows_forget_adapters_that_are_gone(shared: Any) -> None:
    """Rows of a captured forward after those of requests still have numbers of an earlier batch."""
    model = copy.deepcopy(shared)
    adapters = manager_of(model, NgramDraft(min_ngram=1)).engine.target.adapters
    adapters.check("c")
    adapters.renew()
    adapters.seat([None, "b", "c", "c"])
    for layer in layers_of(model):
        for name in "bc":
            layer.delete_adapter(name)
    adapters.renew()
    adapters.seat(["a"])
    with adapters.of_seated(4, 1, is_captured=True):
        pass


def test_adapters_that_go(shared: Any) -> None:
    """Requests that run with one that is removed fail, by name; the others go on."""
    model = copy.deepcopy(shared)
    with manager_of(model, NgramDraft(min_ngram=1), continuous_batching_config=limits(400)) as manager:
        options = {"max_new_tokens": 200, "do_sample": False, "streaming": True, "eos_token_id": -1}
        names = [manager.add_request([5, 6, 7], adapter=name, **options) for name in ("b", "c")]
        seen: set[str] = set()
        while seen != set(names):
            seen.add(manager.get_result(timeout=60).request_id)
        with manager.pause():
            for layer in layers_of(model):
                layer.delete_adapter("b")
        outputs: dict[str, Any] = {}
        while set(outputs) != set(names):
            output = manager.get_result(timeout=60)
            if output.is_finished() or output.error is not None:
                outputs[output.request_id] = output
        assert "adapter='b'` is not loaded" in outputs[names[0]].error and outputs[names[1]].error is None
        with pytest.raises(ValueError, match="adapter='b'` is not loaded.*Loaded: 'a', 'c'"):
            manager.add_request([5], adapter="b")
    assert outputs[names[1]].generated_tokens == alone(model, "c", [5, 6, 7], max_new_tokens=200)
    assert_nothing_left(manager)


@pytest.mark.slow
@pytest.mark.any_version
def test_two_managers_and_a_user(shared: Any) -> None:
    """Of one model at a time, each in its thread, while its user calls `generate`."""
    options = {"max_new_tokens": 60, "do_sample": False}
    with manager_of(shared, NgramDraft(min_ngram=1)) as one, manager_of(shared, NgramDraft(min_ngram=1)) as other:
        names = [
            (manager, choice, prompt, manager.add_request(prompt, adapter=choice, **options))
            for prompt in PROMPTS
            for manager, choice in ((one, "b"), (other, "c"), (one, None))
        ]
        inputs = {"input_ids": torch.tensor([PROMPTS[0]]), "attention_mask": torch.ones(1, len(PROMPTS[0]))}
        active = {tuple(shared.generate(**inputs, **options)[0].tolist()) for _ in range(4)}
        found = [manager.get_result(name, timeout=60).generated_tokens for manager, _, _, name in names]
    assert active == {(*PROMPTS[0], *alone(shared, "a", PROMPTS[0], max_new_tokens=60))}
    assert found == [alone(shared, choice, prompt, max_new_tokens=60) for _, choice, prompt, _ in names]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_left_as_it_was(error: type[BaseException], shared: Any) -> None:
    model = copy.deepcopy(shared)
    before = {name: set(vars(module)) for name, module in model.named_modules()}

    seen: list[Any] = []
    added = stacks.Stack.added
    with pytest.MonkeyPatch.context() as patch:

        def failing(self: Any, output: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(inputs.shape)
            if len(seen) > 40:
                raise error("here")
            return added(self, output, inputs)

        patch.setattr(stacks.Stack, "added", failing)
        with pytest.raises(error):
            texts_of(model, list(CHOICES))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert active_in(model) == {("a",)} and texts_of(model, "b", PROMPTS[:1]) == expected(model, ("b",))
