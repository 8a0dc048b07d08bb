"""Block heads in the forwards of a drafter: tree attention, the cache of a tree, and captured graphs."""

import pytest
import torch
from support.blocks import ALL, block_head, embed, shared_head
from support.eagle import arrays, features_of
from support.goldens import trained_target

from hf_specdec.attention.switch import switched_to_tree_attention
from hf_specdec.cache import TreeCache
from hf_specdec.forwards.node_inputs import causal_chain
from hf_specdec.forwards.tree_forward import TreeForward


@torch.no_grad()
@pytest.mark.parametrize("golden", ALL)
def test_tree_attention(golden):
    """Context rows are a chain; the rows of a block are nodes whose "ancestors" are the rows that they see."""
    head, expected = shared_head(golden), arrays(golden)
    text, device = expected["greedy_ids"], torch.device("cpu")
    features, done = features_of(head, text), 0
    cache = TreeCache(head.config.text_config.num_hidden_layers, 1, device, 256)
    forward = TreeForward(head, cache, None, torch.zeros(1, dtype=torch.long), shift_of_all=0)
    with switched_to_tree_attention(head):
        for step, prefix in enumerate(expected["spec_prefix_len"].tolist()[:3]):
            inputs = {"features": features[:, done:prefix], "logits_to_keep": None}
            first = []
            if golden == "peagle":
                inputs["inputs_embeds"] = embed(head, text[:, done + 1 : prefix + 1])
            context = forward(text[:, done:prefix], *causal_chain(prefix - done, device), inputs=inputs)
            cache.set_lengths([prefix])
            done = prefix
            if golden == "peagle":
                first = [context.hidden_states[:, -1:]]
            tokens = head.block_tokens(text[:, prefix])
            inputs = {"inputs_embeds": embed(head, tokens), "logits_to_keep": None}
            depths = torch.arange(tokens.shape[1])[None]
            block = forward(tokens, head.block_mask(device)[None], depths, inputs=inputs)
            states = torch.cat([*first, block.hidden_states], dim=1)
            torch.testing.assert_close(states[0], expected["block_hidden"][step], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("golden", ALL)
def test_no_value_is_read(golden):
    """On the meta device there are none: nothing that a graph captures waits for the device."""
    head = block_head(golden).to("meta")
    rows, lm_head = head.config.num_rows, torch.nn.Linear(64, 512, device="meta")
    tokens = head.block_tokens(torch.zeros(2, dtype=torch.long, device="meta"))
    mask = torch.zeros(1, 1, rows, rows, device="meta")
    embeddings = torch.zeros(*tokens.shape, 64, device="meta")
    output = head(inputs_embeds=embeddings, attention_mask=mask, logits_to_keep=None)
    logits = head.compute_logits(output.hidden_states, lm_head)
    scores, _ = head.conditional_logits(logits, output.hidden_states, tokens)
    confidence = head.confidence_logits(output.hidden_states, tokens)
    assert scores.shape == (2, rows, 512)
    assert confidence is None or confidence.shape == (2, rows)


def test_the_targets_modules_are_borrowed():
    head, target = shared_head("dflash"), trained_target()
    assert head.embed_tokens is None and head.lm_head is None
    output = head(inputs_embeds=target.get_input_embeddings()(head.block_tokens(torch.tensor([5]))))
    assert output.logits is None
