"""Losses of predictions: the kernels against plain PyTorch, and the gradients against autograd's."""

from __future__ import annotations

import pytest
import torch

from hf_specdec_kernels import draft_losses
from hf_specdec_kernels.draft_losses import naive
from hf_specdec_kernels.draft_losses import triton as in_triton


def arguments(draft_vocab: int | None, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor | None]:
    vocab, count = 150, 9
    vocabulary = None if draft_vocab is None else torch.randperm(vocab)[:draft_vocab].sort().values
    columns = draft_vocab or vocab
    draft_logits, logits = 3 * torch.randn(count, columns), 3 * torch.randn(5, vocab)
    wanted = torch.randint(0, columns, (count,))
    wanted[2] = -1
    rows = torch.randint(0, 5, (count,))
    values = [draft_logits.to(dtype), logits.to(dtype), rows, wanted, vocabulary]
    return [None if value is None else value.to(device) for value in values]


CASES = pytest.mark.parametrize(
    "draft_vocab, dtype, block",
    [(None, torch.float32, 64), (70, torch.float32, 64), (None, torch.bfloat16, 8192), (70, torch.float16, 8192)],
)


@CASES
def test_against_naive(draft_vocab, dtype, block, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_triton, "LARGEST_BLOCK", block)
    given = arguments(draft_vocab, dtype, device)
    values, best = naive.draft_loss_values_naive(*given)
    found, found_best = torch.empty_like(values), torch.empty_like(best)
    in_triton.launch_draft_loss_values(*given, found, found_best)
    torch.testing.assert_close(found, values, atol=1e-5, rtol=1e-5)
    assert torch.equal(best, found_best)
    gradients = torch.randn(len(best), 3, device=device)
    expected = naive.draft_loss_gradient_naive(*given, values, gradients)
    gradient = torch.empty_like(expected)
    in_triton.launch_draft_loss_gradient(*given, values, gradients, gradient)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradient, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("draft_vocab", [None, 70])
def test_gradients_are_those_of_the_losses(draft_vocab: int | None) -> None:
    draft_logits, logits, rows, wanted, vocabulary = arguments(draft_vocab, torch.float32, torch.device("cpu"))
    draft_logits.requires_grad_()
    weights = torch.randn(3, len(rows))

    def by_formula() -> torch.Tensor:
        log_q, p = draft_logits.log_softmax(dim=-1), logits.softmax(dim=-1)[rows]
        if vocabulary is not None:
            p = p[:, vocabulary]
        outside = 0 if vocabulary is None else 1 - p.sum(dim=-1)
        token = torch.where(wanted >= 0, -log_q.gather(1, wanted.clamp(min=0)[:, None])[:, 0], 0.0)
        losses = token, -(p * log_q).sum(dim=-1), (p - log_q.exp()).abs().sum(dim=-1) + outside
        return torch.stack(losses)

    expected = by_formula()
    found = draft_losses(draft_logits, logits, rows, wanted, vocabulary)
    torch.testing.assert_close(torch.stack(found[:3]), expected)
    assert torch.equal(found.best, draft_logits.argmax(dim=-1))
    wanted_gradient = torch.autograd.grad((weights * expected).sum(), draft_logits)
    gradient = torch.autograd.grad((weights * torch.stack(found[:3])).sum(), draft_logits)
    torch.testing.assert_close(gradient, wanted_gradient)


def test_wrong_arguments_are_refused() -> None:
    draft_logits, logits, rows, wanted, _ = arguments(None, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="`logits` has shape"):
        draft_losses(draft_logits, logits[:, :-1], rows, wanted)
    with pytest.raises(TypeError, match="`rows` has dtype"):
        draft_losses(draft_logits, logits, rows.int(), wanted)
    with pytest.raises(ValueError, match="`draft_logits` has strides"):
        draft_losses(draft_logits.T.contiguous().T, logits, rows, wanted)
