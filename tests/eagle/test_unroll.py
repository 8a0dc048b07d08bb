"""
Row t of unrolled step k is what decoding computes on draft level k of a chain that starts behind row t: the head's
forward over rows 0 … t with the target's features, then its own states fed back, with the tokens of the text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.chains import decoded, random_head

from hf_specdec.eagle import EagleConfig, EagleHead
from hf_specdec.eagle import unroll as unroll_module
from hf_specdec.eagle.unroll import UnrollMemory, unroll


TOKENS, STEPS, VOCAB, HIDDEN = 11, 5, 40, 24

_TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    # Fast frequencies: a position more must make a difference.
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}


def config_of(text: dict[str, Any] | None = None, **fields: Any) -> EagleConfig:
    return EagleConfig(text_config=_TEXT | (text or {}), **fields)


_QWEN = {"model_type": "qwen3", "max_window_layers": 0}
CONFIGS: dict[str, EagleConfig] = {
    "eagle3": config_of(),
    "eagle3, draft vocabulary": config_of(draft_vocab_size=16),
    "norm_before_residual": config_of(norm_before_residual=True),
    "norm_output": config_of(norm_output=True),
    "norm_output, no final norm": config_of(norm_output=True, final_norm=False),
    "fc_norm": config_of(fc_norm=True),
    "norm_before_fc": config_of(norm_before_fc=True, fc_bias=True),
    "norm_hidden_twice": config_of(norm_hidden_twice=True),
    "plain embeddings": config_of(norm_embeddings=False),
    "last hidden state, no fc": config_of(num_aux_features=0, has_fc=False),
    "two layers": config_of({"num_hidden_layers": 2}),
    "five features of another width": config_of(aux_layer_ids=[0, 1, 2, 3, 4], target_hidden_size=10),
    "qwen2": config_of({"model_type": "qwen2"}),
    "qwen3": config_of(_QWEN),
    "window of 4": config_of({"sliding_window": 4}),
    "window of 2": config_of({"sliding_window": 2}),
    "window on the second layer": config_of(
        _QWEN
        | {
            "use_sliding_window": True,
            "sliding_window": 3,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    ),
    "no grouped queries": config_of({"num_key_value_heads": 4}),
    "yarn": config_of(
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        }
    ),
    "eagle1": config_of(eagle_version=1),
    "eagle1, two layers": config_of({"num_hidden_layers": 2}, eagle_version=1, fc_bias=True),
}


def inputs_of(head: EagleHead, batch: int = 2, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(batch, tokens, head.config.feature_size, dtype=torch.float64)
    return features, torch.randn(batch, tokens, HIDDEN, dtype=torch.float64)


def largest_difference(head: EagleHead) -> float:
    """Between unrolled rows and decoded chains, relative to their size."""
    features, embeddings = inputs_of(head)
    unrolled = list(unroll(head, features, embeddings, STEPS))
    worst = 0.0
    for row in range(TOKENS - STEPS):
        expected = decoded(head, features, embeddings, row, STEPS)
        got = torch.stack([states[:, row] for states in unrolled], dim=1)
        worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_unrolled_rows_equal_decoded_chains(name: str) -> None:
    assert largest_difference(random_head(CONFIGS[name])) < 1e-12


def _position_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EagleHead.forward

    def wrong(self: EagleHead, *, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        if "unrolled" in kwargs:
            position_ids = position_ids - kwargs["unrolled"].step
        return forward(self, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(EagleHead, "forward", wrong)


def _other_rows_guesses_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(query: Any, visible: Any, scaling: float, first: int, *keys_and_values: torch.Tensor) -> torch.Tensor:
        count = len(keys_and_values) // 2
        groups = query.shape[1] // keys_and_values[0].shape[1]
        key = torch.cat(keys_and_values[:2], dim=2).repeat_interleave(groups, 1)
        value = torch.cat(keys_and_values[count : count + 2], dim=2).repeat_interleave(groups, 1)
        mask = visible.repeat(1, 1, 1, 2)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)

    monkeypatch.setattr(unroll_module, "_attend", wrong)


def _own_guesses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = unroll_module._attend

    def wrong(query: Any, visible: Any, scaling: float, first: int, *rest: torch.Tensor) -> torch.Tensor:
        return attend(query, visible, scaling, len(rest) // 2 - 1, *rest)

    monkeypatch.setattr(unroll_module, "_attend", wrong)


def _state_is_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EagleHead.forward

    def wrong(self: EagleHead, *, hidden_states: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if "unrolled" in kwargs and hidden_states is not None:
            hidden_states = hidden_states.roll(-1, dims=1)
        return forward(self, hidden_states=hidden_states, **kwargs)

    monkeypatch.setattr(EagleHead, "forward", wrong)


def _tokens_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EagleHead.forward

    def wrong(self: EagleHead, *, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        if "unrolled" in kwargs:
            inputs_embeds = inputs_embeds.roll(kwargs["unrolled"].step, dims=1)
        return forward(self, inputs_embeds=inputs_embeds, **kwargs)

    monkeypatch.setattr(EagleHead, "forward", wrong)


def _fed_back_through_fc(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EagleHead.forward

    def wrong(self: EagleHead, *, hidden_states: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if "unrolled" in kwargs and hidden_states is not None:
            return forward(self, features=hidden_states.repeat(1, 1, 3), **kwargs)
        return forward(self, hidden_states=hidden_states, **kwargs)

    monkeypatch.setattr(EagleHead, "forward", wrong)


_WRONG = [
    _position_stands_still,
    _other_rows_guesses_are_seen,
    _own_guesses_are_forgotten,
    _state_is_shifted,
    _tokens_stand_still,
    _fed_back_through_fc,
]


@pytest.mark.parametrize("spoil", _WRONG)
@torch.no_grad()
def test_known_mistakes_are_caught(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head(CONFIGS["eagle3"])
    spoil(monkeypatch)
    assert largest_difference(head) > 0.02


@torch.no_grad()
def test_a_window_that_does_not_move_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = UnrollMemory.visible

    def wrong(self: UnrollMemory, window: int | None) -> torch.Tensor:
        step, self.step = self.step, 0
        mask = visible(self, window)
        self.step = step
        return mask

    monkeypatch.setattr(UnrollMemory, "visible", wrong)
    assert largest_difference(random_head(CONFIGS["window of 4"])) > 0.02


@pytest.mark.parametrize("name", ["eagle3", "window of 4", "eagle1"])
@torch.no_grad()
def test_packed_texts_are_unrolled_as_if_alone(name: str) -> None:
    head = random_head(CONFIGS[name])
    lengths = (7, 11)
    features, embeddings = inputs_of(head, batch=1, tokens=sum(lengths))
    segments = torch.tensor([[0] * lengths[0] + [1] * lengths[1]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = list(unroll(head, features, embeddings, 4, position_ids=positions, segment_ids=segments))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = list(unroll(head, features[:, part], embeddings[:, part], 4))
        for step, (together, single) in enumerate(zip(packed, alone, strict=True)):
            rows = length - 1 - step  # the rows behind have no token of their own text
            assert torch.allclose(together[:, part][:, :rows], single[:, :rows], rtol=1e-12, atol=1e-12)
        start += length


def test_gradients_are_the_same_when_scores_are_computed_anew() -> None:
    head = random_head(CONFIGS["two layers"])
    features, embeddings = inputs_of(head)
    gradients = []
    for recompute in (False, True):
        head.zero_grad()
        sum(states.square().mean() for states in unroll(head, features, embeddings, 4, recompute=recompute)).backward()
        gradients.append([parameter.grad.clone() for parameter in head.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(list(head.parameters())) - 1  # all but the lm_head
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(kept, recomputed, rtol=1e-10, atol=1e-12)


def test_the_attention_implementation_is_given_back() -> None:
    head = random_head(CONFIGS["eagle3"])
    before = head.config.text_config._attn_implementation
    steps = unroll(head, *inputs_of(head), 3)
    next(steps)
    assert head.config.text_config._attn_implementation == before


@pytest.mark.parametrize(
    "text, message",
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_what_unrolling_would_get_wrong_is_refused(text: dict[str, Any], message: str) -> None:
    head = random_head(config_of(text))
    for trains in (True, False) if "rope_parameters" in text else (True,):
        with pytest.raises(ValueError, match=message):
            next(unroll(head.train(trains), *inputs_of(head), 2))


def test_dropout_has_no_effect_on_a_diagnosis() -> None:
    """In evaluation mode there is none."""
    plain, dropping = random_head(config_of({})), random_head(config_of({"attention_dropout": 0.1}))
    dropping.load_state_dict(plain.state_dict())
    inputs = inputs_of(plain)
    found = [list(unroll(head.eval(), *inputs, 2)) for head in (plain, dropping)]
    assert all(torch.equal(states, same) for states, same in zip(*found, strict=True))
