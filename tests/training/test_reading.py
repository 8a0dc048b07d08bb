"""What is read off the target."""

from __future__ import annotations

import pytest
import torch
from support.models import VOCAB, tiny_model

from hf_specdec.training.reading import TargetReader, supports_packing


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "falcon"])
def test_features_logits_and_embeddings(family: str) -> None:
    target = tiny_model(family, dtype=torch.float32)
    layers = target.config.num_hidden_layers
    ids = torch.randint(3, VOCAB, (2, 9))
    token_ids = torch.tensor([4, 9, 30])
    reading = TargetReader(target, [0, 1, layers - 1], token_ids)(ids)
    with torch.no_grad():
        expected = target(ids, output_hidden_states=True)
    features = torch.cat([expected.hidden_states[k] for k in (0, 1, layers - 1)], dim=-1)
    assert torch.allclose(reading.features, features, atol=1e-6)
    assert torch.allclose(reading.logits, expected.logits[..., token_ids], atol=1e-6)
    assert torch.equal(reading.embeddings, target.get_input_embeddings()(ids))
    best = expected.logits.argmax(-1)
    for index, token in enumerate(token_ids.tolist()):
        assert torch.equal(reading.best == index, best == token)
    assert not reading.features.requires_grad and not reading.embeddings.requires_grad
    assert all(parameter.requires_grad for parameter in target.parameters())  # a policy goes on to be trained


def test_the_last_hidden_state_is_after_the_norm() -> None:
    target = tiny_model(dtype=torch.float32)
    ids = torch.randint(3, VOCAB, (2, 9))
    reading = TargetReader(target, [])(ids)
    with torch.no_grad():
        assert torch.allclose(target.lm_head(reading.features), target(ids).logits, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
def test_packing_is_tried_out(family: str) -> None:
    target = tiny_model(family, dtype=torch.float32)
    assert supports_packing(target)
    ids = torch.randint(3, VOCAB, (1, 20))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    together = TargetReader(target, None, packed=True)(ids, positions).logits[:, 8:]
    alone = TargetReader(target, None)(ids[:, 8:])
    assert torch.allclose(together, alone.logits, atol=1e-4)
    assert alone.features.shape == (1, 12, 0)


def test_targets_that_mix_packed_texts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model(dtype=torch.float32)
    forward = target.forward

    def sees_all(input_ids: torch.Tensor, **kwargs: object) -> object:
        return forward(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)

    monkeypatch.setattr(target, "forward", sees_all)
    assert not supports_packing(target)
    monkeypatch.setattr(target, "forward", lambda input_ids, use_cache: forward(input_ids))
    assert not supports_packing(target)
