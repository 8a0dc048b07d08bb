"""
K/V caches that hold the nodes of a tree after the committed tokens.

- `tree_cache`: the cache of a call, and its exchange with transformers' own caches.
- `layers`: the K/V of one attention layer; `kinds_of_layers`: which kind each layer of a model is.
- `paged_cache`, `blocks`: the K/V of requests in flight, in shared blocks; `paged_layers`: those of one layer;
  `paged_states`: which request has which states; `device_paged_cache`: where only the device knows the lengths.
- `held_states`: recurrent and convolutional states of the rows; `state_layers`: those of one layer; `kernel_states`:
  where kernels run.
- `reuse`: which caches of a user can be continued.
- `compaction`: moving accepted nodes by the Triton kernel.
- `sizes`: how large keys and values are.
"""

from .layers import SlotsOfRows, Span, TreeLayer
from .reuse import check_reusable
from .tree_cache import TreeCache


__all__ = ["SlotsOfRows", "Span", "TreeCache", "TreeLayer", "check_reusable"]
