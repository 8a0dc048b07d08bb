"""`Keys`: the tensors of a checkpoint, under our names."""

from __future__ import annotations

import torch

from .reading import Checkpoint


class Keys:
    """
    The tensors of a checkpoint under the names of our model; those that are not needed go to `ignored`.

    Args:
        checkpoint (`Checkpoint`): the published checkpoint.
        renamed (`dict[str, str]`, *optional*): prefixes of published names, and the prefixes that replace them.
        kind (`str`, *optional*): name of what the checkpoint must hold, for error messages.

    Raises:
        ValueError: if two published tensors get the same name.
    """

    def __init__(self, checkpoint: Checkpoint, renamed: dict[str, str] | None = None, kind: str = "an EAGLE head"):
        self.name, self.kind = checkpoint.name, kind
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
                f"{self.name}: the checkpoint has no `{key}`, which {self.kind} needs. It has: "
                f"{', '.join(sorted(self.weights)[:8])}, …"
            )
        shape = tuple(self.weights[key].shape)
        if len(shape) != dimensions or 0 in shape:
            wanted = {1: "vector", 2: "matrix"}.get(dimensions, f"tensor of {dimensions} dimensions")
            raise ValueError(f"{self.name}: `{key}` must be a {wanted}, but has shape {shape}.")
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
