"""The three losses, held against sums that go through texts token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.chains import decoded, random_head
from support.models import UNEQUAL, VOCAB, tiny_model

from hf_specdec.eagle import EagleHead
from hf_specdec.training.distill import DistillObjective, draft_config, new_draft_model
from hf_specdec.training.eagle1 import Eagle1Objective
from hf_specdec.training.heads import new_head, new_head_config
from hf_specdec.training.losses import soft_cross_entropy
from hf_specdec.training.reading import TargetOutputs, TargetReader
from hf_specdec.training.ttt import TttObjective
from hf_specdec.training.vocabulary import choose_vocabulary


TOKENS, STEPS = 12, 3


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model(num_hidden_layers=6)


@pytest.fixture()
def batch() -> dict[str, torch.Tensor]:
    mask = torch.rand(2, TOKENS) < 0.6
    return {
        "input_ids": torch.randint(3, VOCAB, (2, TOKENS)),
        "loss_mask": mask,
        "position_ids": torch.arange(TOKENS).expand(2, -1),
        "segment_ids": torch.zeros(2, TOKENS, dtype=torch.long),
    }


def read(
    target: Any, head: EagleHead, batch: dict[str, torch.Tensor], token_ids: torch.Tensor | None
) -> TargetOutputs:
    boundaries = head.config.aux_boundaries(target.config.num_hidden_layers)
    return TargetReader(target, boundaries, token_ids)(batch["input_ids"])


def head_for(target: Any, token_ids: torch.Tensor | None = None, **options: Any) -> EagleHead:
    size = None if token_ids is None else len(token_ids)
    return random_head(new_head_config(target, draft_vocab_size=size, **options))


@pytest.mark.parametrize("shares_lm_head", [False, True])
@pytest.mark.parametrize("draft_vocabulary", [None, 20])
def test_eagle3_loss(
    target: Any, batch: dict[str, torch.Tensor], draft_vocabulary: int | None, shares_lm_head: bool
) -> None:
    """Every row by the chain that decoding would run; every softmax written out."""
    token_ids = None if draft_vocabulary is None else torch.randperm(VOCAB)[:draft_vocabulary].sort().values
    head = head_for(target, token_ids, shares_lm_head=shares_lm_head)
    outputs = read(target, head, batch, token_ids)
    output = TttObjective(head, STEPS, 0.8)(outputs, **batch)

    with torch.no_grad():
        p_all = target(batch["input_ids"]).logits
        chosen = torch.arange(VOCAB) if token_ids is None else token_ids
        expected, counts = 0.0, torch.zeros(4, STEPS)
        losses: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
        for text in range(2):
            for row in range(TOKENS - 2):
                steps = min(STEPS, TOKENS - 2 - row)
                states = decoded(
                    head, outputs.features[text : text + 1], outputs.embeddings[text : text + 1], row, steps
                )
                for step in range(steps):
                    if not batch["loss_mask"][text, row + 2 + step]:
                        continue
                    logits = (
                        target.lm_head(states[0, step])[chosen] if shares_lm_head else head.lm_head(states[0, step])
                    )
                    at_target = p_all[text, row + 1 + step]
                    counts[0, step] += int(chosen[logits.argmax()] == at_target.argmax())
                    counts[1, step] += 1
                    if at_target.argmax() in chosen:
                        p = at_target[chosen].softmax(-1)
                        losses[step].append(-(p * logits.log_softmax(-1)).sum())
        for step in range(STEPS):
            expected += 0.8**step * sum(losses[step]) / len(losses[step])
            counts[2, step], counts[3, step] = sum(losses[step]), len(losses[step])
    assert float(output["loss"].detach()) == pytest.approx(float(expected), rel=1e-10)
    assert torch.allclose(output["counts"].sum(0), counts, rtol=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "draft"])
def test_packed_texts_have_the_loss_of_single_ones(target: Any, kind: str) -> None:
    lengths, ids = (9, 12), torch.randint(3, VOCAB, (21,))
    mask = torch.rand(21) < 0.7
    if kind == "draft":
        objective: Any = DistillObjective(tiny_model(seed=5), 1, packed=True)
        reader = TargetReader(target, None, packed=True)
    else:
        head = head_for(target, version=3 if kind == "eagle3" else 1)
        objective = TttObjective(head, STEPS) if kind == "eagle3" else Eagle1Objective(head, STEPS)
        reader = TargetReader(target, head.config.aux_boundaries(6), packed=True)
    objective.eval()

    def counts(parts: list[tuple[int, int]]) -> torch.Tensor:
        batch = {
            "input_ids": torch.cat([ids[a:b] for a, b in parts])[None],
            "loss_mask": torch.cat([mask[a:b] for a, b in parts])[None],
            "position_ids": torch.cat([torch.arange(b - a) for a, b in parts])[None],
            "segment_ids": torch.cat([torch.full((b - a,), index) for index, (a, b) in enumerate(parts)])[None],
        }
        with torch.no_grad():
            outputs = reader(batch["input_ids"], batch["position_ids"])
            return objective(outputs=outputs, **batch)["counts"].sum(0)

    pieces = [(0, lengths[0]), (lengths[0], 21)]
    assert torch.allclose(counts(pieces), sum(counts([piece]) for piece in pieces), rtol=1e-5)
    assert not torch.allclose(counts(pieces), counts([(0, 21)]), rtol=1e-3)


def test_eagle1_loss(target: Any, batch: dict[str, torch.Tensor]) -> None:
    head = head_for(target, version=1)
    outputs = read(target, head, batch, None)
    objective = Eagle1Objective(head, STEPS, noise=0.0).train()
    output = objective(outputs, **batch)
    with torch.no_grad():
        last = target.model(batch["input_ids"]).last_hidden_state
        regression, tokens = [], []
        for text in range(2):
            for row in range(TOKENS - 2):
                if batch["loss_mask"][text, row + 2]:
                    state = decoded(head, last[text : text + 1], outputs.embeddings[text : text + 1], row, 1)[0, 0]
                    wanted = last[text, row + 1]
                    gap = (state - wanted).abs()
                    regression.append(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
                    p = target.lm_head(wanted).softmax(-1)
                    tokens.append(-(p * target.lm_head(state).log_softmax(-1)).sum())
        expected = sum(regression) / len(regression) + 0.1 * sum(tokens) / len(tokens)
    assert float(output["loss"].detach()) == pytest.approx(float(expected), rel=1e-10)
    assert output["counts"].shape == (2, 4, 1)
    assert objective.eval()(outputs, **batch)["counts"].shape == (2, 4, STEPS)


def test_eagle1_noise_is_as_long_texts_want_it(target: Any) -> None:
    from hf_specdec.training.eagle1 import _noise

    segments = torch.tensor([[0] * 512 + [1] * 128])
    noise = _noise(torch.zeros(1, 640, 50), segments, 0.1)
    assert 0.098 < noise[:, :512].abs().max() <= 0.1
    assert 0.39 < noise[:, 512:].abs().max() <= 0.4
    assert abs(noise[:, :512].mean()) < 0.002


def test_distillation_loss(target: Any, batch: dict[str, torch.Tensor]) -> None:
    student = tiny_model(seed=7, num_hidden_layers=1)
    outputs = TargetReader(target, None)(batch["input_ids"])
    output = DistillObjective(student, 4, hard=0.25)(outputs, **batch)
    with torch.no_grad():
        p = target(batch["input_ids"]).logits[:, :-1].softmax(-1)
        log_q = student(batch["input_ids"]).logits[:, :-1].log_softmax(-1)
        mask = batch["loss_mask"][:, 1:]
        soft = -(p * log_q).sum(-1)[mask].mean()
        hard = -log_q.gather(-1, batch["input_ids"][:, 1:, None])[..., 0][mask].mean()
        agree = (p.argmax(-1) == log_q.argmax(-1))[mask].sum()
    assert float(output["loss"].detach()) == pytest.approx(float(0.75 * soft + 0.25 * hard), rel=1e-10)
    assert output["counts"].sum(0)[0].tolist() == [float(agree)] * 4


def test_gradients_reach_the_head_alone(target: Any, batch: dict[str, torch.Tensor]) -> None:
    head = head_for(target)
    TttObjective(head, STEPS)(read(target, head, batch, None), **batch)["loss"].backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_nothing_to_learn_is_no_loss(target: Any, batch: dict[str, torch.Tensor]) -> None:
    head = head_for(target)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    loss = TttObjective(head, STEPS)(read(target, head, batch, None), **batch)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_cross_entropy_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_specdec.training import losses

    states = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    lm_head = torch.nn.Linear(8, 20).double()
    target_logits = torch.randn(5, 3, 20, dtype=torch.float64)
    results = []
    for rows in (1, 7, 4096):
        monkeypatch.setattr(losses, "_ROWS_AT_ONCE", rows)
        loss, predicted = soft_cross_entropy(states, lm_head, target_logits)
        (gradient,) = torch.autograd.grad(loss.sum(), states)
        results.append((loss.detach(), predicted, gradient))
    for other in results[1:]:
        assert all(torch.allclose(a, b) for a, b in zip(results[0], other, strict=True))


def test_objectives_refuse_heads_of_the_other_version(target: Any) -> None:
    with pytest.raises(ValueError, match="version 1;"):
        TttObjective(head_for(target, version=1))
    with pytest.raises(ValueError, match="version 3"):
        Eagle1Objective(head_for(target))


def test_new_heads_begin_with_the_targets_rows(target: Any) -> None:
    token_ids = choose_vocabulary(torch.arange(VOCAB), torch.arange(VOCAB), 16)
    config = new_head_config(target, draft_vocab_size=16, target_name="some/target", depth=5)
    head = new_head(target, config, token_ids)
    assert torch.equal(head.target_ids, token_ids)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[token_ids].float())
    assert torch.allclose(head.norm.weight, target.model.norm.weight.float())
    assert config.aux_layer_ids == [1, 3, 5]
    assert config.default_tree["depth"] == 5
    assert config.target_name == "some/target"


def test_norms_of_another_kind_are_left_alone() -> None:
    gemma = tiny_model("gemma2", dtype=torch.float32)
    with torch.no_grad():
        gemma.model.norm.weight.uniform_(-0.5, 0.5)  # it multiplies by 1 + weight
    head = new_head(gemma, new_head_config(gemma))
    assert torch.equal(head.norm.weight, torch.ones(32))


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6, 7, 30])
def test_default_hidden_states_exist(layers: int) -> None:
    config = new_head_config(tiny_model(num_hidden_layers=layers))
    boundaries = config.aux_boundaries(layers)
    assert boundaries == sorted(set(boundaries))
    assert layers < 7 or boundaries == [2, layers // 2, layers - 3]


def test_draft_models_of_the_targets_width_begin_with_its_layers() -> None:
    target = tiny_model(num_hidden_layers=5, dtype=torch.float32)
    model = new_draft_model(target, num_layers=3)
    for layer, source in enumerate((0, 2, 4)):
        expected = target.model.layers[source].self_attn.q_proj.weight
        assert torch.equal(model.model.layers[layer].self_attn.q_proj.weight, expected)
    assert torch.equal(model.lm_head.weight, target.lm_head.weight)
    assert torch.equal(new_draft_model(target, num_layers=5)(torch.arange(9)[None]).logits.argmax(-1),
                       target(torch.arange(9)[None]).logits.argmax(-1))  # fmt: skip


def test_layers_that_differ_stay_as_they_are() -> None:
    """A draft of Gemma 4 has layers with the heads of those that they begin as; a head has those of the first."""
    values = UNEQUAL["gemma4"][1] | {"num_kv_shared_layers": 0}
    target = tiny_model("gemma4_text", dtype=torch.float32, **values)
    model = new_draft_model(target, num_layers=2)
    for layer, source in enumerate((0, 3)):
        expected = target.model.layers[source].self_attn.q_proj.weight
        assert torch.equal(model.model.layers[layer].self_attn.q_proj.weight, expected)
    with pytest.raises(ValueError, match="`hidden_size`=16: .* differ from layer to layer"):
        new_draft_model(target, num_layers=2, hidden_size=16)
    config = new_head_config(target).text_config
    assert (config.num_key_value_heads, config.head_dim) == (2, 8)


def test_narrower_draft_models_keep_what_they_can_of_the_embeddings() -> None:
    target = tiny_model(dtype=torch.float32)
    model = new_draft_model(target, num_layers=1, hidden_size=16)
    assert model.config.num_attention_heads == 2 and model.config.num_key_value_heads == 1
    assert model.config.intermediate_size == 24
    wide, narrow = (m.get_input_embeddings().weight.detach() for m in (target, model))
    assert float(narrow.std()) == pytest.approx(float(wide.std()), rel=1e-4)
    similar = torch.nn.functional.cosine_similarity
    near = torch.corrcoef(
        torch.stack([similar(m[:30, None], m[None, 30:60], dim=-1).flatten() for m in (wide, narrow)])
    )[0, 1]
    assert near > 0.6
    assert model(torch.arange(9)[None]).logits.shape == (1, 9, VOCAB)


@pytest.mark.parametrize("sizes, message", [((0, None), "num_layers"), ((3, None), "num_layers"), ((1, 12), "hidden")])
def test_sizes_a_draft_model_cannot_have(sizes: tuple[int, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft_config(tiny_model().config, *sizes, None)


def test_a_narrow_draft_of_a_target_without_grouped_heads() -> None:
    config = copy.deepcopy(tiny_model().config)
    config.num_key_value_heads = None
    width = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    narrow = draft_config(config, 1, 2 * width, None)
    assert narrow.num_attention_heads == narrow.num_key_value_heads == 2


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "draft"])
@pytest.mark.parametrize("recompute", [False, True])
def test_mixed_precision_as_on_a_gpu(kind: str, recompute: bool, batch: dict[str, torch.Tensor]) -> None:
    """A target in bfloat16, weights in float32, autocast: nearly the loss of float32, gradients in float32."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        target = tiny_model(num_hidden_layers=6, dtype=torch.float32, sharpness=1.5).to(dtype)
        if kind == "draft":
            objective: Any = DistillObjective(new_draft_model(target, num_layers=2), 3)
            reader = TargetReader(target, None)
        else:
            head = new_head(target, new_head_config(target, version=3 if kind == "eagle3" else 1))
            objective = TttObjective(head, STEPS, recompute=recompute) if kind == "eagle3" else Eagle1Objective(head)
            reader = TargetReader(target, head.config.aux_boundaries(6))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = objective(outputs=reader(batch["input_ids"]), **batch)["loss"]
        loss.backward()
        parameters = list(objective.parameters())
        assert all(p.dtype == p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in parameters)
        losses.append(float(loss.detach()))
    assert loss.dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
