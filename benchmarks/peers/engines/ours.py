"""This library: `generate` for one open request, `generate_batch` with a manager that is kept for several."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from load import BLOCK_SIZE, blocks_of
from suite.set_walks import accepting
from suite.sizes import tree_of
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_specdec import SpeculativeConfig, TokenTree, last_metrics
from hf_specdec.loading import load_draft_to
from hf_specdec.metrics import SpeculationMetrics
from hf_specdec.trees.text import parse_tree

from ..job import Answers, Job, versions
from .loading import load, padded, sampling


STATIC_TREE = tree_of(num_nodes=16, depth=5)
"""The tree of steps that accept a set number of tokens: those of a dynamic tree have no fixed order."""


class Ours:
    """The library with a head and the tree of a way."""

    def __init__(self, way: str, job: Job, arguments: dict[str, Any]):
        self._job, self._stack = job, ExitStack()
        self._model = load(job.target, job, job.is_random)
        self._draft = load_draft_to(job.heads["hf_specdec"], getattr(torch, job.dtype), job.device)
        tree = _tree(way, job)
        limit = {"disable_by_batch_size": 0} if way == "plain" else {}
        options = {"compile": job.compile} | limit | arguments
        self._config = SpeculativeConfig(tree=tree, **options)
        if job.acceptance_length is not None and way != "plain":
            assert isinstance(tree, TokenTree)
            self._stack.enter_context(accepting(tree, job.acceptance_length, torch.device(job.device)))
        most = max(job.open)
        blocks = most * (-(-(job.longest + 128) // BLOCK_SIZE) + 1)
        self._batching = ContinuousBatchingConfig(
            **blocks_of(blocks), max_requests_per_batch=most, allow_block_sharing=False
        )
        self.ran_with = versions("hf_specdec", "transformers", "torch", "triton") | {
            "arguments": {
                "tree": job.tree if tree is None else str(tree),
                **options,
                "num_blocks": blocks,
                "acceptance": job.acceptance_length,
            }
        }

    def generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        """
        Completes prompts.

        Raises:
            RuntimeError: if steps are to accept a set number of tokens, and do not.
        """
        answers, wanted = self._generate(prompts, temperature), self._job.acceptance_length
        if wanted is not None and answers.drafts and answers.accepted is not None:
            found = 1 + answers.accepted / answers.drafts
            if found < 0.8 * wanted:  # the last step of a text may be cut
                raise RuntimeError(
                    f"Steps have made {found:.2f} tokens, not {wanted:g}: only captured steps can be told, on a GPU."
                )
        return answers

    def _generate(self, prompts: list[list[int]], temperature: float) -> Answers:
        speculation: dict[str, Any] = {"assistant_model": self._draft, "speculative_config": self._config}
        if len(prompts) == 1:
            inputs = padded(prompts, self._job.device)
            options = sampling(temperature) | {"max_new_tokens": self._job.new_tokens}
            ids = self._model.generate(**inputs, **options, **speculation)
            return _answers(ids[:, len(prompts[0]) :].tolist(), last_metrics())
        config = GenerationConfig(
            **sampling(temperature), max_new_tokens=self._job.new_tokens, eos_token_id=-1, pad_token_id=0
        )
        outputs = self._model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=self._batching,
            persistent_manager=True,
            **speculation,
        ).values()
        failed = next((output.error for output in outputs if output.error), None)
        if failed is not None:
            raise RuntimeError(f"A request has failed: {failed}")
        metrics = SpeculationMetrics.sum_of(output.speculation for output in outputs)
        return _answers([list(output.generated_tokens) for output in outputs], metrics)

    def close(self) -> None:
        """Frees the manager, and lets later steps walk as they do."""
        self._model.destroy_cached_continuous_batching_manager()
        self._stack.close()


def _answers(tokens: list[list[int]], metrics: SpeculationMetrics | None) -> Answers:
    if metrics is None or metrics.num_drafts == 0:
        return Answers(tokens)
    return Answers(tokens, metrics.num_drafts, metrics.num_accepted_tokens)


def _tree(way: str, job: Job) -> Any:
    if way == "tree":
        return parse_tree(job.tree) if job.acceptance_length is None else STATIC_TREE
    return {"plain": TokenTree.chain(1), "chain": TokenTree.chain(job.chain), "auto": "auto"}[way]


def start(way: str, job: Job, arguments: dict[str, Any]) -> Ours:
    """The contender of a way."""
    return Ours(way, job, arguments)
