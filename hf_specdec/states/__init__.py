"""
Recurrent and convolutional layers over the nodes of a tree. A state cannot be cropped, so a step leaves the state at
the committed tokens as it is, keeps what every node adds to it, and applies the accepted path afterwards.

- `recurrence`: what a kind of layer must say; one file for each kind: `delta_rule`,
  `mamba2`, `mamba1`.
- `convolution`: the short convolutions before them, and those of layers that have nothing else.
- `texts`: a text is read block by block, as a chain, or by some kinds with few launches.
- `groups`: rows are followed in groups, where a recurrence takes much memory meanwhile.
- `kernel`: the kernels that compute the same on a GPU; `served`: for which models.
- `topology`: which nodes follow which, as layers read it.
- `hook`: the functions of transformers' model files that run over a tree meanwhile.
- `levels`: mixers that call no such functions, level by level.

`models/layer_kinds.py` says which layers of a model have states; `cache/state_layers.py` holds the states of a layer.
"""

from ..models.layer_kinds import LayerKind, LayerKinds, is_attention_free, layer_kinds_of
from .groups import advance_in_groups, most_bytes, most_bytes_of_reading, score_in_groups
from .hook import mixers_of_their_own, recurrences_of, running_cache, running_over, states_over_trees
from .kernel import KernelForward, PendingPaths, StateKernel, StaticKernelForward
from .recurrence import Recurrence
from .texts import read_text
from .topology import NodeTopology, Path


__all__ = [
    "KernelForward",
    "LayerKind",
    "LayerKinds",
    "NodeTopology",
    "Path",
    "PendingPaths",
    "Recurrence",
    "StateKernel",
    "StaticKernelForward",
    "advance_in_groups",
    "is_attention_free",
    "layer_kinds_of",
    "mixers_of_their_own",
    "most_bytes",
    "most_bytes_of_reading",
    "read_text",
    "recurrences_of",
    "running_cache",
    "running_over",
    "score_in_groups",
    "states_over_trees",
]
