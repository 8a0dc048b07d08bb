"""What drafts of paths of hidden states are made from, step by step, and texts beside those of plain `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import SpeculativeConfig, TokenTree
from hf_specdec.batching import SpeculativeBatchingManager
from hf_specdec.drafters.captured import CapturedDraft
from hf_specdec.drafters.growth import LevelNodes

from .batches import limits, manager_of, text_alone
from .plain import greedy_text


Path = tuple[int, ...]


class RecordsPaths:
    """Keeps of every step the rows' texts, and the logits after all paths that get children."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.steps: list[tuple[list[list[int]], list[dict[Path, torch.Tensor]]]] = []

    def note_roots(self, rows: Any, logits: torch.Tensor) -> None:
        """Begins a step of a call's rows or of requests in flight, with logits at their roots, `[batch, vocab]`."""
        if hasattr(rows, "requests"):
            texts = [list(request.tokens) for request in rows.requests]
        else:
            texts = [rows.tokens(row, 0) for row in range(rows.batch_size)]
        self.steps.append((texts, [{(): row} for row in logits]))
        self._above: list[list[Path]] = [[()] for _ in texts]

    def note_level(self, nodes: LevelNodes, logits: torch.Tensor) -> torch.Tensor:
        """Adds a level's logits, `[batch, nodes, vocab]`, and returns them."""
        parents = nodes.parents.expand(len(logits), -1).tolist()
        for row, tokens in enumerate(nodes.tokens.tolist()):
            paths = [(*self._above[row][parent], token) for token, parent in zip(tokens, parents[row], strict=True)]
            self.steps[-1][1][row].update(zip(paths, logits[row], strict=True))
            self._above[row] = paths
        return logits

    def assert_as_from_scratch(
        self,
        from_scratch: Callable[[list[int], list[int]], torch.Tensor],
        tolerance: float,
        pads: list[int] | None = None,
    ) -> None:
        """
        Compares the logits of the first and the last steps with those `from_scratch` of a text and a path below it;
        `pads`: tokens of padding in every row.
        """
        assert self.steps
        for texts, rows in [*self.steps[:3], *self.steps[-2:]]:
            for row, (text, logits) in enumerate(zip(texts, rows, strict=True)):
                text = text[0 if pads is None else pads[row] :]
                for path, found in logits.items():
                    expected = from_scratch(text, list(path))
                    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def padded_prompts() -> dict[str, torch.Tensor]:
    """Ragged rows, one of them of two tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 64, (3, 18), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, :16] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def assert_requests_as_plain(target: PreTrainedModel, drafter: Any, tree: Any, max_new_tokens: int) -> None:
    """The prompts of `padded_prompts` in flight, read in chunks."""
    prompts = [row[mask == 1].tolist() for row, mask in zip(*padded_prompts().values(), strict=True)]
    found = target.generate_batch(
        prompts,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        assistant_model=drafter,
        tree=tree,
        continuous_batching_config=limits(num_blocks=60, max_batch_tokens=8),
    )
    outputs = [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]
    expected = [
        greedy_text(target, {"input_ids": torch.tensor([prompt])}, max_new_tokens=max_new_tokens)[0, len(prompt) :]
        for prompt in prompts
    ]
    assert outputs == [text.tolist() for text in expected]


WIDE = (*((rank,) for rank in range(10)), (0, 0), (0, 0, 0))
"""Paths of a tree with many children of the root, of which one may well be accepted."""


def wide_tree(logits: Callable[[list[int]], torch.Tensor]) -> list[int]:
    """The tokens of a tree `WIDE` by logits after a path."""
    tokens = logits([]).topk(10).indices.tolist()
    below = int(logits(tokens[:1]).argmax())
    return [*tokens, below, int(logits([tokens[0], below]).argmax())]


def assert_captured_drafts(
    monkeypatch: pytest.MonkeyPatch,
    target: PreTrainedModel,
    draft: Any,
    kind: type[CapturedDraft],
    from_scratch: Callable[[list[int], list[int]], torch.Tensor],
    limit: int | None = None,
    turns: int = 1,
) -> SpeculativeBatchingManager:
    """
    The prompts of `padded_prompts` in flight, read in chunks, which end one after the other: texts are those of plain
    `generate`, and every tree that captured steps draft is that of logits `from_scratch` of a text and a path below.

    Args:
        kind (`type`): class of the draft in captured steps.
        limit (`int`, *optional*): `disable_by_batch_size`.
        turns (`int`): how often texts go on as prompts.

    Returns:
        `SpeculativeBatchingManager`: the manager that has run them.
    """
    drafted: dict[tuple[int, ...], list[int]] = {}
    propose: Any = kind.propose

    def noted(self: Any, *args: Any) -> Any:
        draft, rows = propose(self, *args), self.rows
        values = rows.lengths.tolist(), rows.tail.tolist(), rows.counts.tolist(), draft.tokens.tolist()
        for length, tail, count, tokens in zip(*values, strict=True):
            drafted[(length, *tail[:count])] = tokens  # the last run of a text is that after the capture
        return draft

    monkeypatch.setattr(kind, "propose", noted)
    config = SpeculativeConfig(tree=TokenTree(WIDE), cuda_graphs=True, disable_by_batch_size=limit)
    limited = limits(num_blocks=60, max_batch_tokens=8)
    manager = manager_of(target, draft, tree=None, speculative_config=config, continuous_batching_config=limited)
    prompts = [row[mask == 1].tolist() for row, mask in zip(*padded_prompts().values(), strict=True)]
    outputs: list[Any] = []
    with manager:
        for turn in range(turns):
            names = [
                manager.add_request(prompt, max_new_tokens=number)
                for prompt, number in zip(prompts, (8, 12, 20), strict=True)
            ]
            found = [manager.get_result(name, timeout=60) for name in names]
            prompts = [[*output.prompt_ids, *output.generated_tokens, turn + 5] for output in found]
            outputs += found
    accepted = manager.engine.metrics.num_accepted_tokens
    texts = [output.prompt_ids + output.generated_tokens for output in outputs]
    for output in outputs:
        number = len(output.generated_tokens)
        assert output.generated_tokens == text_alone(target, output.prompt_ids, max_new_tokens=number)
    compared = 0
    for (length, *tail), tokens in drafted.items():
        own = [text[:length] for text in texts if len(text) >= length and text[length - len(tail) : length] == tail]
        expected = [wide_tree(partial(from_scratch, text)) for text in own if tokens]
        assert not expected or tokens in expected
        compared += len(expected)
    assert compared > 2 * turns and (accepted > 0 or limit is not None)
    return manager
