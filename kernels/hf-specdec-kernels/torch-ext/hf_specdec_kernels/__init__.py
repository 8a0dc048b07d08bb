"""
GPU kernels of tree speculative decoding.

Every operator is a pair: `naive.py`, plain PyTorch, which is what runs on a CPU, and `triton.py`. They are registered
with `torch.library`, so that `torch.compile` sees through them; importing this package needs torch alone.
"""

from .draft_tokens import draft_tokens
from .kv_compaction import kv_compaction, pointer_table
from .rejection_sampling import Walks, draft_columns, greedy_walk, rejection_walk, target_walk
from .tree_attention import pack_ancestors, tree_attention


__all__ = [
    "Walks",
    "draft_columns",
    "draft_tokens",
    "greedy_walk",
    "kv_compaction",
    "pack_ancestors",
    "pointer_table",
    "rejection_walk",
    "target_walk",
    "tree_attention",
]
