"""Heads of every format against numbers that the reference implementations computed (tests/goldens)."""

import pytest
import torch
from support.eagle import (
    ALL,
    EAGLE_1,
    EAGLE_3,
    GOLDENS,
    MODELOPTS,
    arrays,
    draft_chain,
    features_of,
    golden_rows,
    head_of,
    largest_difference,
)
from support.goldens import trained_target

from hf_specdec.eagle import EagleHead


TOLERANCE = 1e-4
# ModelOpt's own module, and the servers that load its heads, read them differently.
READINGS = [(golden, "", {}) for golden in ALL] + [
    (golden, "_singlenorm", {"norm_hidden_twice": False}) for golden in MODELOPTS
]


@pytest.mark.parametrize(("golden", "suffix", "options"), READINGS)
def test_hidden_states_and_logits(golden, suffix, options):
    differences = largest_difference(golden_rows(head_of(golden, **options), golden), golden, suffix)
    assert set(differences) == {"head_hidden", "head_logits", "chain_hidden", "chain_logits"}
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("golden", EAGLE_3)
def test_features_are_the_hidden_states_at_the_boundaries(golden):
    expected = arrays(golden)
    head = head_of(golden)
    assert head.config.aux_boundaries(trained_target().config.num_hidden_layers) == [2, 4, 5]
    captured = torch.cat([expected[f"aux_{level}"] for level in ("low", "mid", "high")], dim=-1)
    torch.testing.assert_close(features_of(head, expected["input_ids"]), captured, atol=TOLERANCE, rtol=0)


def test_feature_of_eagle_1_is_the_last_hidden_state_after_the_norm():
    expected = arrays(EAGLE_1)
    found = features_of(head_of(EAGLE_1), expected["input_ids"])
    torch.testing.assert_close(found, expected["last_hidden_postnorm"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("golden", "suffix", "options"), [reading for reading in READINGS if not reading[0].startswith("safeailab")]
)
def test_chains_drafted_along_the_greedy_text(golden, suffix, options):
    expected = arrays(golden)
    head = head_of(golden, **options)
    text = expected["greedy_ids"]
    features = features_of(head, text)
    prefixes = expected[f"spec_prefix_len{suffix}"].tolist()
    drafts = [draft_chain(head, features, text, committed, depth=4) for committed in prefixes]
    assert drafts == expected[f"spec_draft_tokens{suffix}"].tolist()

    continuations = [text[0, committed + 1 : committed + 5].tolist() for committed in prefixes]
    accepted = [
        next((depth for depth in range(len(rest)) if draft[depth] != rest[depth]), len(rest))
        for draft, rest in zip(drafts, continuations, strict=True)
    ]
    assert accepted == expected[f"spec_accept_length{suffix}"].tolist()


@pytest.mark.parametrize("golden", ALL)
def test_the_same_rows_in_pieces(golden):
    """Catching up in two forwards is one forward: the cache holds what it should."""
    from support.eagle import Rows

    expected, head = arrays(golden), head_of(golden)
    features, tokens = features_of(head, expected["input_ids"]), expected["head_input_ids"]
    rows = Rows(head).feed(tokens[:, :10], features[:, :10]).feed(tokens[:, 10:], features[:, 10:])
    torch.testing.assert_close(rows.logits, expected["head_logits"][:, 10:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_on_disk_is_kept_unless_another_is_asked_for(dtype):
    golden = "specforge_eagle3" if dtype == torch.bfloat16 else "speculators_eagle3"
    head = EagleHead.from_pretrained(GOLDENS / golden)
    assert {parameter.dtype for parameter in head.parameters()} == {dtype}
    assert head.follows_target_dtype
    other = torch.float16
    head = EagleHead.from_pretrained(GOLDENS / golden, dtype=other)
    assert {parameter.dtype for parameter in head.parameters()} == {other}
    assert head.d2t.dtype == torch.int64
    assert not head.follows_target_dtype


def test_half_precision_is_near():
    golden = "specforge_eagle3"
    head = head_of(golden, dtype=torch.bfloat16)
    expected = arrays(golden)
    features = features_of(head, expected["input_ids"]).bfloat16()
    embeddings = trained_target().get_input_embeddings()(expected["head_input_ids"]).bfloat16()
    logits = head(inputs_embeds=embeddings, features=features).logits.float()
    difference = (logits - expected["head_logits"]).abs()
    assert difference.mean() < 0.1
    assert difference.max() > 1e-3  # it did run in half precision
