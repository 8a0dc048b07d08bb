"""`TreeTarget`: the target's forwards over prompts and over the trees of a step, whatever holds its K/V."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..cache import TreeCache
from ..trees import DraftTree
from ..uploads import on_device
from .features import Features, watch_features
from .node_inputs import causal_chain
from .tree_forward import TreeForward


class TreeTarget:
    """
    The target of a call, or of requests in flight.

    Args:
        model (`PreTrainedModel`): the target.
    """

    cache: TreeCache
    """K/V of the rows."""
    forward: TreeForward
    """Forwards over the cache."""
    features: Features | None = None
    """Hidden states recorded for the drafter; None if it reads none."""
    is_running = False
    """
    Whether a forward of this target is running: other callers may run the same model, as a logits processor may.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    @contextmanager
    def watched(self, boundaries: list[int]) -> Iterator[Features]:
        """A context that records hidden states of this target's forwards, also of replays; see `watch_features`."""
        with watch_features(self.model, boundaries, lambda: self.is_running) as self.features:
            try:
                self.record()
                yield self.features
            finally:
                self.features = None
                self.record()

    def record(self) -> None:
        """Lets forwards record `features`."""
        if hasattr(self, "forward"):
            self.forward.features = self.features

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for forwards of this target."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    # ------------------------------------------------------------------------------------------------------- prefill

    def read_chunk(self, tokens: torch.Tensor, ends: list[int]) -> ModelOutput:
        """
        Forwards a chunk of every row's text (`[batch, width]`, int64), which ends in the row's slot before `ends`; its
        first tokens may have been forwarded before. The output has the logits of the last, `[batch, 1, vocab]`.
        """
        width = tokens.shape[1]
        self.cache.set_lengths([end - width for end in ends])
        with self.running():
            outputs = self.forward(tokens, *causal_chain(width, tokens.device), logits_to_keep=1)
        self.cache.set_lengths(ends)
        outputs.logits = outputs.logits[:, -1:]  # some models return all
        return outputs

    def read_padded(
        self,
        tokens: torch.Tensor,
        counts: list[int],
        prompt_counts: list[int] | None = None,
        width: int | None = None,
    ) -> ModelOutput:
        """
        Forwards the next `counts` tokens of every row's text, right-padded with copies of the last one.

        Args:
            tokens (`torch.Tensor` of shape `[batch, most]`, int64): the tokens, with any padding behind.
            counts (`list[int]`): tokens of every row that count.
            prompt_counts (`list[int]`, *optional*): how many of these are of the prompt; all, if None.
            width (`int`, *optional*): tokens per row of a forward that texts of all lengths share, as a CUDA graph; by
                default the longest row decides.

        Returns:
            `ModelOutput`: the model's output, with the logits of every row's last token, `[batch, 1, vocab]`.
        """
        most, device = width or max(counts), tokens.device
        # At the position of the last token: the model may know no later one.
        depths = torch.arange(most, device=device).minimum(on_device(counts, device)[:, None] - 1)
        last = [count - 1 for count in counts]
        wanted = sorted(set(last))
        kept: int | torch.Tensor = 1 if wanted == [most - 1] else torch.tensor(wanted, device="cpu")
        if width is not None:
            kept = 0  # all, for rows of any length
        elif isinstance(kept, torch.Tensor) and hasattr(self.model, "_hf_hook"):
            kept = most - wanted[0]  # accelerate would move the tensor to the first layer's device, not the last's
        with self.running():
            outputs = self.forward(
                tokens.gather(1, depths),
                *causal_chain(most, device),
                position_depths=depths,
                logits_to_keep=kept,
                counts=counts,
                prompt_counts=prompt_counts,
            )
        self.cache.keep_text(counts)
        if isinstance(kept, torch.Tensor) and outputs.logits.shape[1] == len(wanted):  # some models return all logits
            last = [wanted.index(place) for place in last]
        else:
            last = [place - most + outputs.logits.shape[1] for place in last]
        logits = outputs.logits
        outputs.logits = logits[torch.arange(len(last), device=logits.device), on_device(last, logits.device)][:, None]
        return outputs

    # --------------------------------------------------------------------------------------------------------- steps

    def score_nodes(self, roots: torch.Tensor, draft: DraftTree) -> tuple[DraftTree, ModelOutput]:
        """
        Forwards the root (`[batch, 1]`, int64) and all draft nodes of every row; or the roots alone, if the model
        refuses the positions of nodes. Returns the tree that was forwarded, and the output with its logits, `[batch,
        nodes + 1, vocab]`.
        """
        try:
            return draft, self._forward(roots, draft)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not self.gives_up_positions(draft):
                raise
        if self.features is not None:
            self.features.drop()
        draft = DraftTree.empty(len(roots), roots.device)
        return draft, self._forward(roots, draft)

    def gives_up_positions(self, draft: DraftTree) -> bool:
        """
        Whether a forward that failed may succeed without the draft nodes: code of a user's own may refuse positions
        past those of its config.
        """
        return False

    def _forward(self, roots: torch.Tensor, draft: DraftTree) -> ModelOutput:
        topology, drafted, position_depths = draft.topology, draft.tokens, None
        if draft.valid is not None:
            drafted = torch.where(draft.valid, drafted, roots)  # invalid nodes repeat the root
            position_depths = topology.depths * draft.usable()
        tokens = torch.cat([roots, drafted], dim=1)
        with self.running():
            return self.forward(tokens, topology.ancestors, topology.depths, position_depths=position_depths)
