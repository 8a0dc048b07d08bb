"""The ways in which the sweep runs models with state layers, besides those of all models."""

from __future__ import annotations

from typing import Any

from support.random_trees import RandomTrees

from .modes import Outcome, Runner, prompts


ROWS, NEW_TOKENS, END_PLACE = 3, 32, 9
ALONE, PADDED, ENDING, TOGETHER = "alone", "padded batch", "rows that end", "generate_batch"
_MODES = (ALONE, PADDED, ENDING, TOGETHER)
Texts = list[list[int]]


def state_outcomes(runner: Runner) -> dict[str, Outcome]:
    """The outcome of every mode, by its name."""
    return {f"random trees, {mode}": outcome_of(runner, mode, seed) for seed, mode in enumerate(_MODES)}


def outcome_of(runner: Runner, mode: str, seed: int) -> Outcome:
    """The outcome of random trees, drawn by a seed: `ALONE`, in a batch, or in one call of `generate_batch`."""
    options: dict[str, Any] = {}
    try:
        if mode == TOGETHER:
            return _together(runner, seed)
        expected = texts = _written(runner, 1 if mode == ALONE else ROWS)
        if mode == ENDING:
            options["eos_token_id"] = texts[1][END_PLACE - NEW_TOKENS]
            expected = _written(runner, ROWS, **options)
    except Exception as error:
        return Outcome("nothing", f"plain generate: {type(error).__name__}: {error}")
    draft = RandomTrees(texts, seed)
    options |= {"assistant_model": draft, "tree": draft.default_tree}
    return runner.compared(lambda: _written(runner, len(texts), **options), lambda: expected, is_batch=False)


def _written(runner: Runner, rows: int, **options: Any) -> Texts:
    """The whole texts of padded prompts."""
    return runner.model.generate(**prompts(rows), do_sample=False, max_new_tokens=NEW_TOKENS, **options).tolist()


def _together(runner: Runner, seed: int) -> Outcome:
    """Of prompts without padding in one `generate_batch`, beside each alone."""
    inputs, options = prompts(ROWS), {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    alone = [ids[mask.bool()] for ids, mask in rows]
    texts = [runner.model.generate(ids[None], **options)[0].tolist() for ids in alone]
    draft = RandomTrees(texts, seed)

    def call() -> Texts:
        found = runner.model.generate_batch(
            [ids.tolist() for ids in alone], assistant_model=draft, tree=draft.default_tree, **options
        )
        return [list(result.generated_tokens) for result in found.values()]

    expected = [text[len(ids) :] for text, ids in zip(texts, alone, strict=True)]
    return runner.compared(call, lambda: expected, is_batch=True)
