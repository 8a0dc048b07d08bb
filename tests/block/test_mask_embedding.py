"""Heads whose masks have an embedding of their own, which is no row of the vocabulary's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.blocks import block_head, golden_blocks
from support.eagle import publish, published
from support.goldens import trained_target

from hf_specdec import BlockHead
from hf_specdec.block.formats import write_block


GOLDEN, SIZE, MASK = "dflash", 64, 13
FILES = {
    "a tensor among the weights": None,
    "a file": lambda embedding: embedding,
    "a file with two dimensions": lambda embedding: embedding[None],
    "a file that names the token": lambda embedding: {"mask_token_id": MASK, "embedding": embedding},
    "a file with a name": lambda embedding: {"mask_embedding": embedding},
}


def with_own_mask(folder: Path, embedding: torch.Tensor, kind: str = "a tensor among the weights") -> Path:
    config, weights = published(GOLDEN)
    make = FILES[kind]
    if make is None:
        weights["mask_embedding"] = embedding
    publish(folder, config, weights)
    if make is not None:
        torch.save(make(embedding), folder / "mask_embedding.pt")
    return folder


@pytest.mark.parametrize("kind", FILES)
def test_read(kind: str, tmp_path: Path) -> None:
    """With the mask token's row the head is as before; with another, as with that row in the vocabulary."""
    table = trained_target().get_input_embeddings().weight
    same = block_head(with_own_mask(tmp_path, table[MASK].detach().clone(), kind))
    assert same.config.has_mask_embedding and "own" in same.config.conventions["mask_token_id"]
    expected = golden_blocks(block_head(GOLDEN), GOLDEN)["block_logits"]
    torch.testing.assert_close(golden_blocks(same, GOLDEN)["block_logits"], expected)
    other = block_head(with_own_mask(tmp_path, table[7].detach().clone(), kind))
    expected = golden_blocks(block_head(GOLDEN, mask_token_id=7), GOLDEN)["block_logits"]
    torch.testing.assert_close(golden_blocks(other, GOLDEN)["block_logits"], expected)
    left_out = block_head(tmp_path, has_mask_embedding=False)
    assert left_out.mask_embedding is None


def test_no_token_is_needed(tmp_path: Path) -> None:
    config, weights = published(GOLDEN)
    config["dflash_config"] = {name: value for name, value in config["dflash_config"].items() if "mask" not in name}
    publish(tmp_path, config, weights | {"mask_embedding": torch.ones(SIZE)})
    head = block_head(tmp_path)
    assert head.config.mask_token_id is None and head.block_tokens(torch.tensor([5]))[0, 0] == 5


@pytest.mark.parametrize(
    "content, words",
    [
        (torch.ones(SIZE + 1), ("mask_embedding", str(SIZE))),
        (torch.ones(2, 3, 4), ("mask_embedding.pt", "[2, 3, 4]")),
        ("a text", ("mask_embedding.pt", "str")),
        ({"mask_token_id": 4, "embedding": torch.ones(SIZE)}, ("mask_embedding.pt", "`mask_token_id`=4", str(MASK))),
        ({"mask_token_id": MASK}, ("mask_embedding.pt", "mask_token_id")),
        (torch.full((SIZE,), torch.nan), ("`mask_embedding`", "not finite")),
    ],
)
def test_damaged(content: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    publish(tmp_path, *published(GOLDEN))
    torch.save(content, tmp_path / "mask_embedding.pt")
    with pytest.raises(ValueError) as caught:
        BlockHead.from_pretrained(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_saved_and_refused_where_it_cannot_be_said(tmp_path: Path) -> None:
    head = block_head(with_own_mask(tmp_path / "head", torch.randn(SIZE)))
    head.save_pretrained(tmp_path / "saved")
    again = block_head(tmp_path / "saved")
    assert torch.equal(head.mask_embedding, again.mask_embedding)
    for format in ("zlab", "speculators"):
        with pytest.raises(ValueError, match="`has_mask_embedding`=True"):
            write_block(head, tmp_path / format, format)
