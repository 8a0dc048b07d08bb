"""What a position's logits become once the token before it is known, against loops written out."""

import pytest
import torch
from torch import nn

from hf_specdec.block import BlockConfig, BlockHead


SIZE, RANK, TARGET, DRAFT = 12, 6, 30, 20


def head_with(**fields) -> BlockHead:
    layers = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 8}
    layers |= {"hidden_size": SIZE, "vocab_size": TARGET, "num_hidden_layers": 1}
    config = BlockConfig(text_config=layers, mask_token_id=1, aux_layer_ids=[1], **fields)
    torch.manual_seed(0)
    head = BlockHead(config).eval()
    for parameter in head.parameters():
        parameter.data.normal_(std=0.5)
    return head


def step(head, kind, base, state, token, z):
    """One position of the chain: its logits, and the state that goes on."""
    markov = head.markov_head
    embedding = markov.markov_w1.weight[token]
    if kind == "gated":
        inputs = torch.cat([state, embedding])
        gate = 1 / (1 + torch.exp(-(markov.gate_proj.weight @ inputs + markov.gate_proj.bias)))
        embedding = gate * embedding
    elif kind == "rnn":
        inputs = torch.cat([z, embedding, state])
        joint = markov.joint_proj.weight @ inputs + markov.joint_proj.bias
        gate, candidate, output = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
        gate = 1 / (1 + torch.exp(-gate))
        z = gate * z + (1 - gate) * torch.tanh(candidate)
        embedding = torch.tanh(output)
    return base + markov.markov_w2.weight @ embedding, z


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads_along_a_chain(kind):
    head = head_with(markov_rank=RANK, markov_type=kind, draft_vocab_size=DRAFT)
    base, states, tokens = torch.randn(7, DRAFT), torch.randn(7, SIZE), torch.randint(TARGET, (7,))
    assert head.conditions
    z, carried = torch.zeros(RANK), None
    for position in range(7):
        expected, z = step(head, kind, base[position], states[position], tokens[position], z)
        node = slice(position, position + 1)
        found, carried = head.conditional_logits(base[None, node], states[None, node], tokens[None, node], carried)
        torch.testing.assert_close(found[0, 0], expected, atol=1e-5, rtol=0)
        if kind == "rnn":
            torch.testing.assert_close(carried[0, 0], z, atol=1e-5, rtol=0)
        else:
            assert carried is None


@torch.no_grad()
def test_states_of_a_tree():
    """Nodes of one level carry the states of their own parents."""
    head = head_with(markov_rank=RANK, markov_type="rnn")
    base, states = torch.randn(2, 1, TARGET), torch.randn(2, 1, SIZE)
    _, root = head.conditional_logits(base, states, torch.tensor([[3], [4]]))
    carried = root.expand(-1, 3, -1).clone()
    carried[:, 2] = torch.randn(2, RANK)
    tokens = torch.tensor([[5, 6, 5], [7, 7, 8]])
    found, _ = head.conditional_logits(base.expand(-1, 3, -1), states.expand(-1, 3, -1), tokens, carried)
    for row in range(2):
        for node in range(3):
            expected, _ = step(head, "rnn", base[row, 0], states[row, 0], tokens[row, node], carried[row, node])
            torch.testing.assert_close(found[row, node], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_selector():
    head = head_with(selector_rank=RANK, selector_top_k=4)
    selector, base, states = head.candidate_selector, torch.randn(2, 3, TARGET), torch.randn(2, 3, SIZE)
    tokens = torch.randint(TARGET, (2, 3))
    found, carried = head.conditional_logits(base, states, tokens)
    assert carried is None and found.dtype == torch.float32
    for row in range(2):
        for node in range(3):
            after = selector.predecessor_codebook[tokens[row, node]] * (
                selector.hidden_projection.weight @ states[row, node]
            )
            scores = base[row, node] + selector.successor_codebook @ after
            best = base[row, node].argsort(descending=True)[:4]
            expected = torch.full((TARGET,), -torch.inf)
            expected[best] = scores[best]
            torch.testing.assert_close(found[row, node], expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("with_markov", [False, True])
def test_confidence(with_markov):
    head = head_with(markov_rank=RANK, has_confidence_head=True, confidence_with_markov=with_markov)
    states, tokens, proj = torch.randn(2, 3, SIZE), torch.randint(TARGET, (2, 3)), head.confidence_head.proj
    inputs = torch.cat([states, head.markov_head.markov_w1.weight[tokens]], dim=-1) if with_markov else states
    expected = inputs @ proj.weight[0] + proj.bias
    torch.testing.assert_close(head.confidence_logits(states, tokens), expected)


@torch.no_grad()
def test_no_condition():
    head, base = head_with(), torch.randn(1, 2, TARGET)
    assert not head.conditions
    found, carried = head.conditional_logits(base, torch.randn(1, 2, SIZE), torch.zeros(1, 2, dtype=torch.long))
    assert torch.equal(found, base) and carried is None


@torch.no_grad()
def test_multiplier_and_soft_cap():
    head, lm_head, states = head_with(output_multiplier=3.0), nn.Linear(SIZE, TARGET), torch.randn(1, 2, SIZE)
    torch.testing.assert_close(head.compute_logits(states, lm_head), 3 * lm_head(states))
    head = head_with(output_multiplier=3.0, final_logit_softcapping=1.5, has_lm_head=True)
    expected = 1.5 * torch.tanh(2 * head.lm_head(states))
    torch.testing.assert_close(head.compute_logits(states, lm_head), expected)


@torch.no_grad()
def test_scaled_embeddings():
    """Scaled are the tokens of a block, not the context."""
    embeddings = torch.randn(1, 8, SIZE)
    expected = head_with()(inputs_embeds=2.5 * embeddings).hidden_states
    found = head_with(embedding_scale=2.5)(inputs_embeds=embeddings).hidden_states
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_convolutions_written_out():
    head = head_with(conv_kernel_size=3, conv_group_size=4)
    convolution = head.layers[0].attention_conv
    inputs, states = torch.randn(1, 5, SIZE), torch.randn(5, SIZE)
    from hf_specdec.block.layers import convolve

    for side, kernels in enumerate(convolution.kernels(inputs)):
        found = convolve(states[None], kernels)[0]
        for row in range(5):
            added = (convolution.kernel_projection.weight @ inputs[0, row]).view(2, 3, 3)
            expected = torch.zeros(SIZE)
            for tap in range(min(3, row + 1)):
                for channel in range(SIZE):
                    factor = convolution.base_kernel[side, tap, channel] + added[side, tap, channel // 4]
                    expected[channel] += factor * states[row - tap, channel]
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_fewer_rows_than_taps():
    head = head_with(conv_kernel_size=3, conv_group_size=4)
    full = torch.randn(1, 8, SIZE)
    one = head(inputs_embeds=full[:, :1], attention_mask=torch.zeros(1, 1, 1, 1)).hidden_states
    assert one.shape == (1, 1, SIZE) and bool(one.isfinite().all())


def test_logits_without_an_lm_head():
    with pytest.raises(ValueError, match="`lm_head`: this head has none"):
        head_with().compute_logits(torch.zeros(1, 1, SIZE))
