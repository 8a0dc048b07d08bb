"""
GPU kernels of tree speculative decoding.

Every operator has two versions: `naive.py`, plain PyTorch, which runs on a CPU, and `triton.py`, which runs on CUDA.
Operators are registered with `torch.library`, so that `torch.compile` can trace them; importing this package needs
only torch.
"""

from .draft_tokens import draft_tokens
from .kv_compaction import kv_compaction, pointer_table
from .merged_linear import merged_linear
from .rejection_sampling import Walks, draft_columns, greedy_walk, rejection_walk, target_walk
from .tree_attention import pack_ancestors, tree_attention


__all__ = [
    "Walks",
    "draft_columns",
    "draft_tokens",
    "greedy_walk",
    "kv_compaction",
    "pack_ancestors",
    "merged_linear",
    "pointer_table",
    "rejection_walk",
    "target_walk",
    "tree_attention",
]
