"""
`GemmaAssistant`: a small model that drafts for a Gemma 4 from the target's own K/V.

Its layers have queries alone: they attend to the committed tokens in the target's last layer of the same kind that has
K/V of its own. All tokens of a tree are at one position and attend to no other node, so that a path is told by the
state that its last node hands on (what transformers' `Gemma4AssistantForCausalLM` computes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ..checkpoints.pretrained import PublishedModel
from ..checkpoints.reading import Checkpoint, HubOptions
from .configuration_gemma import GemmaAssistantConfig, config_of


@dataclass(frozen=True, eq=False)
class SharedKV:
    """
    What the layers of one kind attend to.

    Args:
        keys, values (`torch.Tensor` of shape `[batch, kv_heads, slots, head_dim]`): the target's K/V.
        mask (`torch.Tensor` of shape `[batch, 1, 1, slots]`, bool, *optional*): which slots count; None: all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """What queries, `[batch, heads, nodes, head_dim]`, read, in the same shape."""
        # All nodes and all heads of a group attend to the same keys: they are the queries of one head.
        groups = queries.reshape(len(queries), self.keys.shape[1], -1, queries.shape[3])
        mixed = nn.functional.scaled_dot_product_attention(
            groups, self.keys, self.values, attn_mask=self.mask, scale=1.0
        )
        return mixed.reshape(queries.shape)  # on CUDA it is laid out otherwise


@dataclass(frozen=True, eq=False)
class SharedBlocks:
    """
    What the layers of one kind attend to, in blocks that the tree-attention kernel reads.

    Args:
        keys, values (`torch.Tensor` of shape `[blocks, kv_heads, block_size, head_dim]`): the target's K/V.
        tables (`torch.Tensor` of shape `[batch, blocks]`, int64): block table of every row.
        lengths (`torch.Tensor` of shape `[batch]`, int64): committed tokens of every row.
        window (`int`, *optional*): how many of the last of them count; None: all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    window: int | None = None

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """What queries, `[batch, heads, nodes, head_dim]`, read, in the same shape."""
        from hf_specdec_kernels import tree_attention

        nodes, depths = queries.shape[2], self.lengths.new_zeros(1, queries.shape[2])
        mixed = tree_attention(
            queries.to(self.keys.dtype),
            self.keys,
            self.values,
            self.lengths,
            self.lengths.new_zeros(1, nodes, 1),  # they attend to no node
            num_nodes=1,
            query_depths=depths,
            node_depths=depths[:, :1],
            block_tables=self.tables,
            scale=1.0,
            window=None if self.window is None else self.window + 1,  # the queries are one position further
        )
        return mixed.transpose(1, 2).to(queries.dtype)


class Shared(Protocol):
    """What the layers of one kind attend to."""

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """What queries, `[batch, heads, nodes, head_dim]`, read, in the same shape."""


@dataclass(frozen=True, eq=False)
class AssistantOutput:
    """
    Args:
        hidden_states (`torch.Tensor` of shape `[batch, nodes, H]`): what the nodes' children read in place of the
            target's feature.
        logits (`torch.Tensor` of shape `[batch, nodes, vocab]`): of the tokens after the nodes.
    """

    hidden_states: torch.Tensor
    logits: torch.Tensor


class QueryAttention(nn.Module):
    """Attention to keys and values of the target."""

    def __init__(self, config: Any, index: int):
        super().__init__()
        self.kind = config.layer_types[index]
        self.head_dim = config.per_layer_config[index].head_dim
        size, bias = config.num_attention_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, size, bias=bias)
        self.q_norm = _norm(self.head_dim, config)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=bias)

    def forward(
        self, states: torch.Tensor, shared: Mapping[str, Shared], rotary: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        batch, nodes = states.shape[:2]
        kv, (cos, sin) = shared[self.kind], rotary[self.kind]
        queries = self.q_norm(self.q_proj(states).view(batch, nodes, -1, self.head_dim)).transpose(1, 2)
        queries = queries * cos[:, None] + _rotated(queries) * sin[:, None]
        return self.o_proj(kv.attend(queries).transpose(1, 2).reshape(batch, nodes, -1))


class GatedMlp(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, config: Any):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(config.hidden_size, config.intermediate_size, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_activation]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(states)) * self.up_proj(states))


class AssistantLayer(nn.Module):
    """Attention and MLP, each between two norms, and a scale of the whole."""

    def __init__(self, config: Any, index: int):
        super().__init__()
        self.self_attn, self.mlp = QueryAttention(config, index), GatedMlp(config)
        self.input_layernorm, self.post_attention_layernorm = (_norm(config.hidden_size, config) for _ in range(2))
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            _norm(config.hidden_size, config) for _ in range(2)
        )
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, states: torch.Tensor, *attended: Any) -> torch.Tensor:
        mixed = self.self_attn(self.input_layernorm(states), *attended)
        states = states + self.post_attention_layernorm(mixed)
        changed = self.mlp(self.pre_feedforward_layernorm(states))
        return (states + self.post_feedforward_layernorm(changed)) * self.layer_scalar.to(states.dtype)


class AssistantLayers(nn.Module):
    """The layers, the norm after them, and the embeddings, of which only the logits are made."""

    def __init__(self, config: Any):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AssistantLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = _norm(config.hidden_size, config)


class CentroidLogits(nn.Module):
    """Logits of the tokens of the best centroids; all others get one below the lowest of these."""

    def __init__(self, config: GemmaAssistantConfig):
        super().__init__()
        self.num_best = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(config.text_config.hidden_size, config.num_centroids, bias=False)
        self.token_ordering: torch.Tensor
        self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.long))

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        best = self.centroids(states).topk(self.num_best, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[best].flatten(-2)
        found = (embeddings[tokens] @ states[..., None])[..., 0]
        others = found.amin(dim=-1, keepdim=True) - 1.0
        return others.expand(*states.shape[:-1], len(embeddings)).scatter(-1, tokens, found)


class GemmaAssistant(PublishedModel):
    """
    An assistant of a Gemma 4, to be passed as `generate(assistant_model=assistant)`. The arithmetic is that of
    transformers' `Gemma4AssistantForCausalLM`.

    `from_pretrained` reads what Google publishes (`google/gemma-4-…-it-assistant`) and what `save_pretrained` writes.
    Fields of `GemmaAssistantConfig` among its arguments override the checkpoint's, such as `default_tree=`.

    Args:
        config (`GemmaAssistantConfig`): its layers and sizes.
    """

    config_class = GemmaAssistantConfig
    config_arguments = ("default_tree", "position_of_feature", "target_name")
    kind = "an assistant of Gemma 4"
    attends_by_itself = True
    embed_tokens = lm_head = target_ids = None
    """The assistant reads the target's embeddings, and has logits of its own over the whole vocabulary."""
    base_model_prefix = ""
    main_input_name = "features"

    def __init__(self, config: GemmaAssistantConfig):
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

        super().__init__(config)
        text_config, size = config.text_config, config.backbone_hidden_size
        self.model = AssistantLayers(text_config)
        self.rotary_emb = Gemma4TextRotaryEmbedding(text_config)
        self.pre_projection = nn.Linear(2 * size, text_config.hidden_size, bias=False)
        self.post_projection = nn.Linear(text_config.hidden_size, size, bias=False)
        self.masked_embedding = CentroidLogits(config) if config.use_ordered_embeddings else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets the frequencies of rotary embeddings, which no checkpoint holds; all else is read."""
        if module is getattr(self, "rotary_emb", None):
            for name, frequencies in type(module)(module.config).named_buffers():
                getattr(module, name).copy_(frequencies)

    @classmethod
    def of(cls, model: PreTrainedModel) -> GemmaAssistant:
        """An assistant over the weights of a `Gemma4AssistantForCausalLM` that transformers has loaded."""
        name = model.name_or_path or type(model).__name__
        config = config_of(name, model.config.to_dict())
        with torch.device("meta"):
            assistant = cls(config)
        weights = _renamed(dict(model.state_dict()))
        assistant.load_state_dict(weights, strict=True, assign=True)
        rotary: Any = model.model.rotary_emb  # its frequencies are in no checkpoint
        assistant.rotary_emb = rotary
        assistant.name_or_path = model.name_or_path
        return assistant.eval()

    @classmethod
    def read_published(
        cls, name: str, options: HubOptions
    ) -> tuple[GemmaAssistantConfig, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Config and weights of an assistant; the lm_head is left out, which is a copy of the embeddings."""
        checkpoint = Checkpoint.read(name, options)
        return config_of(checkpoint.name, checkpoint.config), _renamed(checkpoint.weights), {}

    @property
    def layer_kinds(self) -> list[str]:
        """The kinds of its layers, each once."""
        return sorted(set(self.config.text_config.layer_types))

    def head_dim(self, kind: str) -> int:
        """The size of keys of the layers of a kind."""
        config = self.config.text_config
        return config.per_layer_config[config.layer_types.index(kind)].head_dim

    def window(self, kind: str) -> int | None:
        """How many of the last committed tokens the layers of a kind attend to; None: all."""
        return self.config.text_config.sliding_window + 1 if kind == "sliding_attention" else None

    def forward(
        self,
        features: torch.Tensor,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        shared: Mapping[str, Shared],
    ) -> AssistantOutput:
        """
        Args:
            features (`torch.Tensor` of shape `[batch, nodes, H]`): for the root, the target's hidden state of the
                token before it, after the final norm; for other nodes, the output of their parent.
            inputs_embeds (`torch.Tensor` of shape `[batch, nodes, H]`): the target's scaled embeddings of the nodes.
            position_ids (`torch.Tensor` of shape `[batch, 1]`, int64): the one position of all nodes of a row.
            shared (`dict[str, SharedKV]`): by kind of layer, what they attend to.
        """
        states = self.pre_projection(torch.cat([inputs_embeds, features], dim=-1))
        rotary = {kind: self.rotary_emb(states, position_ids, kind) for kind in shared}
        for layer in self.model.layers:
            states = layer(states, shared, rotary)
        states = self.model.norm(states)
        embeddings = self.model.embed_tokens.weight
        if self.masked_embedding is None:
            logits = nn.functional.linear(states, embeddings)
        else:
            logits = self.masked_embedding(states, embeddings)
        return AssistantOutput(self.post_projection(states), logits)


def _norm(size: int, config: Any) -> nn.Module:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    return Gemma4RMSNorm(size, eps=config.rms_norm_eps)


def _rotated(states: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights without the lm_head, the order of tokens in int64."""
    kept = {key: tensor for key, tensor in weights.items() if key != "lm_head.weight"}
    order = "masked_embedding.token_ordering"
    return kept | ({order: kept[order].long()} if order in kept else {})
