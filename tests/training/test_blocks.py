"""The losses of block heads, held against sums that go through blocks one by one."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.blocks import block_head
from support.goldens import trained_target
from support.random_blocks import HEADS, drafted, random_block_head

from hf_specdec import BlockHead
from hf_specdec.training import blocks
from hf_specdec.training.blocks import BlockObjective, default_gamma
from hf_specdec.training.data import Text
from hf_specdec.training.loss_weights import WEIGHTS, LossWeights
from hf_specdec.training.packing import Collator, Rows
from hf_specdec.training.reading import TargetReader
from hf_specdec.training.vocabulary import draft_indices


TOKENS = 24
TRAINED = {name: HEADS[name] for name in ("dflash", "jetspec", "vanilla", "gated", "rnn", "draft vocabulary")}


@pytest.fixture()
def batch() -> dict[str, torch.Tensor]:
    mask = torch.rand(2, TOKENS) < 0.8
    return {
        "input_ids": torch.randint(5, 512, (2, TOKENS)),
        "loss_mask": mask,
        "position_ids": torch.arange(TOKENS).expand(2, -1),
        "segment_ids": torch.zeros(2, TOKENS, dtype=torch.long),
    }


@lru_cache
def frozen_target() -> Any:
    """The target as a training run freezes it: not the one that all tests share."""
    return copy.deepcopy(trained_target()).eval().requires_grad_(False)


def reader_for(head: BlockHead, packed: bool = False) -> TargetReader:
    target = frozen_target()
    boundaries = head.config.aux_boundaries(target.config.num_hidden_layers)
    return TargetReader(target, boundaries, head.target_ids, packed, all_logits=True)


def read(head: BlockHead, batch: dict[str, torch.Tensor]) -> Any:
    return reader_for(head)(batch["input_ids"], batch["position_ids"])


def expected_loss(head: BlockHead, batch: dict[str, torch.Tensor], gamma: float) -> tuple[float, torch.Tensor]:
    """Loss and counts, block by block, with every softmax written out."""
    config, target = head.config, trained_target()
    indices = draft_indices(head.target_ids, 512, torch.device("cpu"))
    sums, weights, counts = torch.zeros(3), torch.zeros(3), torch.zeros(4, head.num_drafts)
    for ids, allowed in zip(batch["input_ids"], batch["loss_mask"], strict=True):
        with torch.no_grad():
            p_all = target(ids[None]).logits[0].softmax(-1)
        for anchor in range(1, TOKENS - 1):
            _, _, logits, confidence = drafted(head, ids[None], anchor)
            for depth in range(1, head.num_drafts + 1):
                place = anchor + depth
                if place >= TOKENS or not allowed[anchor + 1 : place + 1].all():
                    break
                weight, p, q = math.exp(-(depth - 1) / gamma), p_all[place - 1], logits[depth - 1].softmax(-1)
                token = int(ids[place]) if indices is None else int(indices[ids[place]])
                best = int(p.argmax()) if indices is None else int(indices[p.argmax()])
                counts[0, depth - 1] += int(q.argmax()) == best
                counts[1, depth - 1] += 1
                if token >= 0:
                    sums[0] -= weight * q[token].log()
                    weights[0] += weight
                    counts[2, depth - 1] -= q[token].log()
                    counts[3, depth - 1] += 1
                whole = q if indices is None else torch.zeros(512).index_copy(0, head.target_ids, q)
                distance = (p - whole).abs().sum()
                sums[1] += weight * distance
                weights[1:] += weight
                if confidence is not None:
                    accepted, estimate = 1 - distance / 2, confidence[depth - 1].sigmoid()
                    sums[2] -= weight * (accepted * estimate.log() + (1 - accepted) * (1 - estimate).log())
    factors = torch.tensor([0.1, 0.9, 1.0] if config.kind == "dspark" else [1.0, 0.0, 0.0])
    return float((factors * sums / weights.clamp(min=1e-9)).sum()), counts


@pytest.mark.parametrize("at_once", [2**27, 1])
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.some_cases(1)
def test_the_loss(kind: str, at_once: int, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all anchors that there are, at once or one by one."""
    monkeypatch.setattr(blocks, "_LOGITS_AT_ONCE", at_once)
    head = random_block_head(**TRAINED[kind])
    output = BlockObjective(head, gamma=3.0)(read(head, batch), **batch)
    expected, counts = expected_loss(head, batch, 3.0)
    assert float(output["loss"].detach()) == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(output["counts"].sum(0), counts, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "draft vocabulary"])
def test_the_kernels_loss_is_that_of_the_formula(
    kind: str, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, found = random_block_head(**TRAINED[kind]), []
    weights = LossWeights(cross_entropy=0.3, divergence=0.7, distance=0.5, confidence=1.0)
    for suits in (False, True):
        monkeypatch.setattr(blocks, "_suits_the_kernel", lambda logits, suits=suits: suits)
        head.zero_grad()
        output = BlockObjective(head, weights)(read(head, batch), **batch)
        output["loss"].backward()
        gradients = [parameter.grad for parameter in head.parameters() if parameter.requires_grad]
        found.append((output["loss"].detach(), output["counts"], *gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_divergence_is_the_mean_cross_entropy_over_what_the_target_may_write(batch: dict[str, torch.Tensor]) -> None:
    """−Σ p log q is smallest where q is p; its gradient is that of the cross-entropy with every token, by p."""
    head = random_block_head(**TRAINED["vanilla"])
    logits, rows = torch.randn(1, 3, 512), torch.tensor([[0, 2]])
    draft_logits = torch.randn(1, 2, 512, requires_grad=True)
    _, divergence, _, _ = blocks._by_formula(draft_logits, logits, rows, torch.zeros(1, 2, dtype=torch.long), None)
    p, log_q = logits[0, [0, 2]].softmax(-1), draft_logits[0].log_softmax(-1)
    torch.testing.assert_close(divergence[0], -(p * log_q).sum(-1))
    entropy = -(p * p.log()).sum(-1)
    assert (divergence[0] > entropy).all()
    loss = BlockObjective(head, LossWeights(divergence=1.0))(read(head, batch), **batch)["loss"]
    assert float(loss.detach()) > 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("kl=1", "'kl=1' is not one of cross_entropy, divergence, distance, confidence"),
        ("divergence", "'divergence' is not one of"),
        ("divergence=-1", "'divergence=-1' is not"),
        ("distance=nan", "'distance=nan' is not"),
        ("confidence=1", "leaves nothing to learn from: give cross_entropy, divergence or distance"),
        ("distance=1,distance=2", "gives 'distance' twice"),
    ],
)
def test_weights_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"`loss_weights`={text!r}.*{message}"):
        LossWeights.parse(text)


def test_a_confidence_head_without_a_weight_is_frozen(batch: dict[str, torch.Tensor]) -> None:
    """Processes that average their gradients wait for those of every parameter that is trained."""
    head = random_block_head(**TRAINED["vanilla"])
    BlockObjective(head, LossWeights(divergence=1.0))(read(head, batch), **batch)["loss"].backward()
    trained = {name for name, one in head.named_parameters() if one.requires_grad}
    assert trained == {name for name, one in head.named_parameters() if one.grad is not None}
    assert not any("confidence" in name for name in trained)


def test_the_kind_says_what_is_summed() -> None:
    assert BlockObjective(random_block_head(**HEADS["vanilla"])).weights == WEIGHTS["dspark"]
    assert BlockObjective(random_block_head()).weights == WEIGHTS["dflash"]


@pytest.mark.parametrize("kind", TRAINED)
def test_gradients_reach_what_is_trained(kind: str, batch: dict[str, torch.Tensor]) -> None:
    head = random_block_head(**TRAINED[kind])
    BlockObjective(head).train()(read(head, batch), **batch)["loss"].backward()
    for name, parameter in head.named_parameters():
        if name.startswith("lm_head"):
            assert parameter.grad is None and not parameter.requires_grad
        else:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in frozen_target().parameters())


def test_nothing_to_learn_is_no_loss(batch: dict[str, torch.Tensor]) -> None:
    head = random_block_head(**HEADS["vanilla"])
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    loss = BlockObjective(head)(read(head, batch), **batch)["loss"]
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in head.parameters())


def test_anchors(batch: dict[str, torch.Tensor]) -> None:
    """Drawn anew in training and the same in evaluation; tokens with context, after which a token is predicted."""
    segments = torch.tensor([[0] * 10 + [1] * 14, [0] * 24])
    can_be = torch.zeros(2, TOKENS, dtype=torch.bool)
    for text in range(2):
        for place in range(1, TOKENS - 1):
            own = segments[text, place - 1] == segments[text, place] == segments[text, place + 1]
            can_be[text, place] = own and batch["loss_mask"][text, place + 1]
    objective = BlockObjective(random_block_head(), num_anchors=6)
    drawn = {}
    for mode in (True, False):
        objective.train(mode)
        drawn[mode] = []
        for _ in range(40):
            places, is_anchor = objective._anchors(batch["loss_mask"], segments)
            assert places.shape == (2, 6) and is_anchor.all() and can_be.gather(1, places).all()
            assert all(len(set(row)) == 6 and row == sorted(row) for row in places.tolist())
            drawn[mode].append(places)
    assert all(torch.equal(one, drawn[False][0]) for one in drawn[False])
    found = torch.zeros_like(can_be)
    for places in drawn[True]:
        found.scatter_(1, places, True)
    assert torch.equal(found, can_be)
    few = batch["loss_mask"].clone()
    few[0, 4:] = False
    places, is_anchor = objective._anchors(few, segments)
    assert is_anchor[0].sum() == sum(can_be[0, :3]) and is_anchor[1].all()


def test_packed_texts_have_the_loss_of_single_ones() -> None:
    head = random_block_head(**HEADS["vanilla"])
    texts = [Text(torch.randint(5, 512, (length,)).tolist(), [(2, length)]) for length in (9, 14, 20)]
    objective, reader = BlockObjective(head).eval(), reader_for(head, packed=True)

    @torch.no_grad()
    def counts(rows: Rows) -> torch.Tensor:
        batch = Collator(0, 48)([rows[index] for index in range(len(rows))])
        return objective(outputs=reader(batch["input_ids"], batch["position_ids"]), **batch)["counts"].sum(0)

    packed, single = Rows(texts, 48, packed=True), Rows(texts, 48, packed=False)
    assert (len(packed), len(single)) == (1, 3)
    torch.testing.assert_close(counts(packed), counts(single), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("golden", ["dflash", "jetspec", "dspark"])
def test_trained_heads_have_less_loss(golden: str, written: list[Text]) -> None:
    """Than a random one has, on what the target wrote; and they are right about its tokens more often."""
    head = block_head(golden)
    rows = Rows([text for text in written if len(text.input_ids) > 16][:8], 64, packed=False)
    batch = Collator(0)([rows[index] for index in range(len(rows))])
    found = []
    for one in (head, BlockHead(head.config).float()):
        if one.lm_head is not None:
            one.lm_head.weight.data.copy_(head.lm_head.weight)
            one.embed_tokens.weight.data.copy_(head.embed_tokens.weight)
        with torch.no_grad():
            output = BlockObjective(one).eval()(read(one, batch), **batch)
        right, of = output["counts"].sum(0)[:2, 0]
        found.append((float(output["loss"]), float(right / of)))
    assert found[0][0] < 0.7 * found[1][0]
    assert found[0][1] > 2 * found[1][1]


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "draft vocabulary"])
def test_mixed_precision_as_on_a_gpu(kind: str, batch: dict[str, torch.Tensor]) -> None:
    """Under autocast: nearly the loss of float32, gradients in float32."""
    head, losses = random_block_head(**HEADS[kind]), []
    outputs = read(head, batch)
    for enabled in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = BlockObjective(head)(outputs, **batch)["loss"]
        loss.backward()
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        assert all(p.dtype == p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in trained)
        losses.append(float(loss.detach()))
    assert loss.dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_gamma() -> None:
    assert [default_gamma(size) for size in (7, 8, 12, 16)] == [4, 4, 5.5, 7]
    assert default_gamma(2) < default_gamma(6) < 4 < default_gamma(32)


@pytest.mark.parametrize("golden", ["dflash2", "peagle"])
def test_other_kinds_are_refused(golden: str) -> None:
    with pytest.raises(ValueError, match=f"kind '{golden}'; 'dflash' and 'dspark' are trained"):
        BlockObjective(block_head(golden))
