"""`Keys`: the tensors of a checkpoint, under our names."""

from __future__ import annotations

import torch

from ...checkpoints.reading import Checkpoint


class Keys:
    """
    The tensors of a checkpoint under the names of `EagleHead`; those that are not needed go to `ignored`.

    Args:
        checkpoint (`Checkpoint`): the published checkpoint.
        renamed (`dict[str, str]`, *optional*): prefixes of published names, and the prefixes that replace them.

    Raises:
        ValueError: if two published tensors get the same name.
    """

    def __init__(self, checkpoint: Checkpoint, renamed: dict[str, str] | None = None):
        self.name = checkpoint.name
        self.weights: dict[str, torch.Tensor] = {}
        for published, tensor in checkpoint.weights.items():
            key = published
            for prefix, ours in (renamed or {}).items():
                if published.startswith(prefix):
                    key = ours + published.removeprefix(prefix)
                    break
            if key in self.weights:
                raise ValueError(f"{self.name}: the checkpoint holds `{key}` twice, the second time as `{published}`.")
            self.weights[key] = tensor
        self.ignored: dict[str, torch.Tensor] = {}
        for key in [key for key in self.weights if key.endswith("rotary_emb.inv_freq")]:
            self.drop(key)

    def __contains__(self, key: str) -> bool:
        return key in self.weights

    def shape(self, key: str, dimensions: int = 2) -> tuple[int, ...]:
        """
        The shape of a required tensor.

        Raises:
            ValueError: if the tensor is missing, has another number of dimensions than `dimensions`, or is empty.
        """
        if key not in self.weights:
            raise ValueError(
                f"{self.name}: the checkpoint has no `{key}`, which an EAGLE head needs. It has: "
                f"{', '.join(sorted(self.weights)[:8])}, …"
            )
        shape = tuple(self.weights[key].shape)
        if len(shape) != dimensions or 0 in shape:
            kind = "matrix" if dimensions == 2 else "vector"
            raise ValueError(f"{self.name}: `{key}` must be a {kind}, but has shape {shape}.")
        return shape

    def drop(self, key: str) -> torch.Tensor | None:
        """Removes a tensor that is not needed, and returns it; None if it is missing."""
        tensor = self.weights.pop(key, None)
        if tensor is not None:
            self.ignored[key] = tensor
        return tensor

    def num_layers(self) -> int:
        """
        Number of decoder layers.

        Raises:
            ValueError: if the layers' numbers have a gap.
        """
        found = {key.split(".")[1] for key in self.weights if key.startswith("layers.")}
        wrong = sorted(found - {str(index) for index in range(len(found))})
        if wrong:
            raise ValueError(
                f"{self.name}: there are {len(found)} decoder layers, which must be `layers.0` to "
                f"`layers.{len(found) - 1}`, but one is `layers.{wrong[0]}`."
            )
        return len(found)

    def eagle_version(self) -> int:
        """
        The head's EAGLE version: 1 if the first layer's attention reads the hidden state alone (q_proj is `[q, H]`), 3
        if it reads the embedding, too (`[q, 2·H]`).

        Raises:
            ValueError: if q_proj reads another width.
        """
        hidden_size, _ = self.shape("layers.0.self_attn.o_proj.weight")
        _, width = self.shape("layers.0.self_attn.q_proj.weight")
        if width not in (hidden_size, 2 * hidden_size):
            raise ValueError(
                f"{self.name}: `layers.0.self_attn.q_proj.weight` reads {width} values, but the hidden size is "
                f"{hidden_size}: an EAGLE-1 head reads {hidden_size}, an EAGLE-3 head {2 * hidden_size}."
            )
        return 1 if width == hidden_size else 3
