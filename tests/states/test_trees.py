"""Trees over the states of layers, against numbers of a reference and against states computed token by token."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.goldens import TINY_TARGET
from support.hybrids import ONE_OF_EACH, hybrid
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.compat import CACHE
from hf_specdec.forwards.outputs import over_trees
from hf_specdec.forwards.tree_forward import TreeForward
from hf_specdec.states import layer_kinds_of


GOLDEN = TINY_TARGET.parent / "qwen3_5_mtp"
EXACT = {"atol": 1e-5, "rtol": 0.0}
NEAR = {"atol": 1e-4, "rtol": 1e-4}  # random models of larger values, and sums in another order
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 6]
"""An irregular tree, breadth-first; node 0 is the root."""


@cache
def golden() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    return AutoModelForCausalLM.from_pretrained(GOLDEN).eval(), load_file(GOLDEN / "golden.safetensors")


def ancestors_of(parents: list[int]) -> torch.Tensor:
    """`[1, nodes, nodes]` bool."""
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        ancestors[node] = ancestors[parent] if parent >= 0 else False
        ancestors[node, node] = True
    return ancestors[None]


class Trees:
    """A model over trees, behind prompts that it has read."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor):
        self.model = model
        kinds = layer_kinds_of(model)
        self.cache = TreeCache(len(kinds or ()), len(prompt), model.device, 64, kinds=kinds)
        with over_trees(model), torch.no_grad():
            self.prompt = model(input_ids=prompt, use_cache=True, **{CACHE: self.cache}).logits
        self.cache.adopt_prefill()
        self.forward = TreeForward(model, self.cache, None, torch.zeros(len(prompt), dtype=torch.long))

    def run(self, tokens: torch.Tensor, parents: list[int], start: int = 0, **options: Any) -> torch.Tensor:
        """Logits at the nodes from `start` on."""
        ancestors = ancestors_of(parents)[:, start:]
        depths = ancestors_of(parents).sum(dim=2) - 1
        with over_trees(self.model), torch.no_grad():
            return self.forward(
                tokens[:, start:], ancestors, depths[:, start:], depths, offset=start, **options
            ).logits

    def states(self) -> list[torch.Tensor]:
        """The states of all layers, copied."""
        found = []
        for layer in self.cache.state_layers:
            found += [layer.conv_states[0].clone()]
            found += [] if layer.recurrent_states[0] is None else [layer.recurrent_states[0].clone()]
        return found


def states_after(model: PreTrainedModel, tokens: torch.Tensor, prompt: int) -> list[torch.Tensor]:
    """The states that transformers has after a text: a prompt at once (some bound dt there), the rest one by one."""
    held, sizes = DynamicCache(config=model.config), [prompt, *[1] * (tokens.shape[1] - prompt)]
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        for some, places in zip(tokens.split(sizes, dim=1), positions.split(sizes, dim=1), strict=True):
            model(input_ids=some, position_ids=places, use_cache=True, **{CACHE: held})
    found = []
    for layer in held.layers:
        if hasattr(layer, "conv_states"):
            found += [layer.conv_states[0]] + [one for one in [layer.recurrent_states[0]] if one is not None]
    return found


def assert_states(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **NEAR)


def test_golden_tree() -> None:
    """Logits at the nodes, and the states after a path."""
    model, expected = golden()
    trees = Trees(model, expected["input_ids"])
    torch.testing.assert_close(trees.prompt, expected["target_logits"], **EXACT)
    parents = expected["tree_parents"].tolist()
    logits = trees.run(expected["tree_tokens"][None], parents)
    torch.testing.assert_close(logits[0], expected["tree_logits"], **EXACT)
    before = torch.cat(trees.states()[::2])  # which a tree must not have changed
    torch.testing.assert_close(before, expected["prompt_conv_states"], **EXACT)
    trees.cache.keep([expected["tree_path"].tolist()[1:]])
    trees.cache.settle()
    after = trees.states()
    torch.testing.assert_close(torch.cat(after[::2]), expected["path_conv_states"], **EXACT)
    torch.testing.assert_close(torch.cat(after[1::2]), expected["path_recurrent_states"], **EXACT)


def test_golden_tree_level_by_level() -> None:
    model, expected = golden()
    trees = Trees(model, expected["input_ids"])
    parents = expected["tree_parents"].tolist()
    depths = (ancestors_of(parents).sum(dim=2) - 1)[0].tolist()
    levels = [depths.index(depth) for depth in range(max(depths) + 1)] + [len(parents)]
    found = [
        trees.run(expected["tree_tokens"][None, :end], parents[:end], start)
        for start, end in zip(levels, levels[1:], strict=False)
    ]
    torch.testing.assert_close(torch.cat(found, dim=1)[0], expected["tree_logits"], **EXACT)


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.some_cases(1)
def test_rows_that_keep_different_paths(family: str) -> None:
    """One keeps a path, one only the root, one nothing, although some node of each is not a number."""
    model = hybrid(family)
    prompt = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    trees = Trees(model, prompt)
    before = trees.states()
    tokens = torch.randint(3, 60, (3, len(PARENTS)), generator=torch.Generator().manual_seed(2))
    trees.run(tokens, PARENTS)
    for layer in trees.cache.state_layers:  # of a node that no row keeps, and of a row that keeps none
        for pending in layer.pending.values():
            kept = [values for scan in pending.kept or () for values in scan.values()]
            for values in [pending.conv_inputs.transpose(1, 2), *kept]:
                if values.is_floating_point():
                    values[:, 5] = values[2] = torch.nan
    trees.cache.keep([[1, 3, 6], [], None])
    trees.cache.settle()
    text = torch.cat([prompt[:1], tokens[:1, [0, 1, 3, 6]]], dim=1)
    assert_states([states[:1] for states in trees.states()], states_after(model, text, 7))
    text = torch.cat([prompt[1:2], tokens[1:2, :1]], dim=1)
    assert_states([states[1:2] for states in trees.states()], states_after(model, text, 7))
    for state, old in zip(trees.states(), before, strict=True):
        assert torch.equal(state[2], old[2])


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.some_cases(2)
def test_texts_of_different_lengths(family: str) -> None:
    """A text longer than the blocks in which recurrences read it; padding behind shorter rows does not count."""
    model, generator = hybrid(family), torch.Generator().manual_seed(3)
    prompt, tokens = (torch.randint(3, 60, (3, length), generator=generator) for length in (4, 70))
    trees, counts = Trees(model, prompt), [70, 17, 0]
    trees.run(tokens, list(range(-1, 69)), counts=counts, prompt_counts=[0, 0, 0])
    trees.cache.keep_text(counts)
    assert trees.cache.lengths == [74, 21, 4]
    for row, count in enumerate(counts):
        text = torch.cat([prompt[row : row + 1], tokens[row : row + 1, :count]], dim=1)
        assert_states([states[row : row + 1] for states in trees.states()], states_after(model, text, 4))


@pytest.mark.parametrize("most", [9, 8, 7])
def test_paths_that_are_cut_where_the_text_ends(most: int) -> None:
    model = hybrid("qwen3_5_text")
    prompt = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(4))
    trees, tokens = Trees(model, prompt), torch.arange(3, 12)[None]
    trees.run(tokens, PARENTS)
    trees.cache.keep([[1, 3]])
    assert trees.cache.lengths == [10]
    trees.cache.settle([most])
    text = torch.cat([prompt, tokens[:, [0, 1, 3]]], dim=1)[:, :most]
    assert_states(trees.states(), states_after(model, text, 7))
