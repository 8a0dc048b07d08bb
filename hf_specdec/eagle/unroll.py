"""
EAGLE heads unrolled over a whole text: the steps of drafting, for all rows at once.

EAGLE-3's "training-time test" (arXiv 2503.01840, section 3.2). At step 0 every row t reads the target's feature, as in
the catch-up forward of decoding. At step k row t reads the state that it produced at step k − 1, as on draft level k:
it attends to the rows up to t of step 0, whose features the target has computed, and to its own rows of steps 1 … k,
whose features are the head's approximations. The position of row t at step k is t + k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from ..attention import window_of
from ..whole_texts import attention_lent, check_rope, check_trainable
from .modeling_eagle import EagleHead


NAME = "hf_specdec_unrolled"


@dataclass
class UnrollMemory:
    """
    Keys and values of the unrolled steps so far, and their attention masks.

    Args:
        causal (`torch.Tensor` of shape `[batch or 1, rows, rows]`, bool): rows of step 0 that each row sees, before
            sliding windows apply: the rows of its own text up to itself.
        recompute (`bool`): whether attention scores are recomputed in the backward pass instead of being stored.
        step (`int`): the present step.
        keys, values (`dict`): by (layer, step), `[batch, kv heads, rows, head_dim]`.
        masks (`dict`): results of `visible`, by (window, step).
    """

    causal: torch.Tensor
    recompute: bool = False
    step: int = 0
    keys: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    values: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def visible(self, window: int | None) -> torch.Tensor:
        """The rows of step 0 that the rows of the present step see, `[batch or 1, 1, rows, rows]` bool."""
        index = (window, self.step if window is not None else 0)
        if index not in self.masks:
            mask = self.causal
            if window is not None:
                rows = torch.arange(mask.shape[-1], device=mask.device)
                mask = mask & (rows[:, None] + self.step - rows[None, :] < window)
            self.masks[index] = mask[:, None]
        return self.masks[index]


def unrolled_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    unrolled: UnrollMemory,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention over the unrolled steps, registered with transformers' `AttentionInterface`.

    Args:
        module (`nn.Module`): the attention layer.
        query (`torch.Tensor` of shape `[batch, heads, rows, head_dim]`): queries of the present step.
        key, value (`torch.Tensor` of shape `[batch, kv heads, rows, head_dim]`): keys and values of the present step.
        attention_mask (`torch.Tensor`): unused; the mask comes from `unrolled`.
        scaling (`float`): factor of the scores.
        unrolled (`UnrollMemory`): keys, values and masks of all steps; `key` and `value` are added to it.

    Returns:
        The output, `[batch, rows, heads, head_dim]`, and None for the weights.
    """
    layer, step = module.layer_idx, unrolled.step
    unrolled.keys[layer, step], unrolled.values[layer, step] = key, value
    visible = unrolled.visible(window_of(module.config, layer))
    if step == 0:
        groups = module.num_key_value_groups
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    else:
        keys = [unrolled.keys[layer, index] for index in range(step + 1)]
        values = [unrolled.values[layer, index] for index in range(step + 1)]
        first = max(1, step + 1 - (window_of(module.config, layer) or step + 1))
        arguments: tuple[Any, ...] = (query, visible, scaling, first, *keys, *values)
        if unrolled.recompute and torch.is_grad_enabled():
            output = checkpoint(_attend, *arguments, use_reentrant=False)
        else:
            output = _attend(*arguments)
    return output.transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, visible: torch.Tensor, scaling: float, first: int, *keys_and_values: torch.Tensor
) -> torch.Tensor:
    """
    Attention with one softmax over the visible rows of step 0 and the row's own keys of the steps from `first` on.

    Step 0 gives a matrix of scores, each later step one score per row. Output: `[batch, heads, rows, head_dim]`.
    """
    count = len(keys_and_values) // 2
    keys, values = keys_and_values[:count], keys_and_values[count:]
    batch, heads, rows, size = query.shape
    kv_heads = keys[0].shape[1]
    query = query.reshape(batch, kv_heads, heads // kv_heads, rows, size)
    # Query heads that share keys become further rows of one multiplication, so keys are not copied.
    far = torch.matmul(query.flatten(2, 3), keys[0].transpose(-1, -2)).view(*query.shape[:-1], rows) * scaling
    far = far.masked_fill(~visible[:, :, None], float("-inf"))
    own = [(query * key[:, :, None]).sum(-1, keepdim=True) * scaling for key in keys[first:]]
    scores = torch.cat([far, *own], dim=-1)
    weights = upcast(scores).softmax(dim=-1).to(query.dtype)
    output = torch.matmul(weights[..., :rows].flatten(2, 3), values[0]).view_as(query)
    for index, value in enumerate(values[first:]):
        output = output + weights[..., rows + index, None] * value[:, :, None]
    return output.reshape(batch, heads, rows, size)


AttentionInterface.register(NAME, unrolled_attention)


def unroll(
    head: EagleHead,
    features: torch.Tensor,
    embeddings: torch.Tensor,
    num_steps: int,
    *,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    recompute: bool = False,
) -> Iterator[torch.Tensor]:
    """
    The head's states at every unrolled step.

    Row t of step k equals the state that decoding computes on draft level k of a chain that starts after row t and
    drafts the tokens of the text.

    Args:
        head (`EagleHead`): the head, in training or evaluation mode; its attention implementation is replaced during
            each step.
        features (`torch.Tensor` of shape `[batch, tokens, feature_size]`): the target's features; row t belongs to
            token t.
        embeddings (`torch.Tensor` of shape `[batch, tokens, H]`): embeddings of the tokens, unshifted.
        num_steps (`int`): K.
        position_ids (`torch.Tensor` of shape `[batch, tokens]`, int64, *optional*): defaults to 0, 1, …
        segment_ids (`torch.Tensor` of shape `[batch, tokens]`, int64, *optional*): number of each token's text in a
            packed row; texts do not see each other.
        recompute (`bool`, *optional*, defaults to `False`): saves memory at the cost of time, see `UnrollMemory`.

    Yields:
        `torch.Tensor` of shape `[batch, tokens, H]`: for k = 0 … K − 1 the states that the lm_head reads (after the
        final norm if there is one). Row t of step k predicts token t + 2 + k; the last k + 1 rows are meaningless,
        because their input embeddings wrap around.

    Raises:
        ValueError: for rotary embeddings that depend on the length of the text, or attention dropout in training mode.
    """
    check_rope(head)
    if head.training:
        check_trainable(head)
    batch, tokens = features.shape[:2]
    device = features.device
    if position_ids is None:
        position_ids = torch.arange(tokens, device=device)[None]
    rows = torch.arange(tokens, device=device)
    causal = (rows[:, None] >= rows[None, :])[None]
    if segment_ids is not None:
        causal = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
    memory = UnrollMemory(causal, recompute)
    placeholder = torch.empty(1, 1, 1, 1, device=device)  # four dimensions: the head makes no mask of its own
    states = None
    for step in range(num_steps):
        memory.step = step
        source = {"features": features} if states is None else {"hidden_states": states}
        with attention_lent(head, NAME):
            output = head(
                **source,
                inputs_embeds=embeddings.roll(-1 - step, dims=1),
                attention_mask=placeholder,
                position_ids=position_ids + step,
                logits_to_keep=1,
                unrolled=memory,
            )
        states = output.hidden_states
        yield states if head.norm is None or head.config.norm_output else head.norm(states)


def upcast(values: torch.Tensor) -> torch.Tensor:
    """Casts to float32 unless float64: half precision is too coarse for a softmax over many tokens."""
    return values if values.dtype == torch.float64 else values.float()
