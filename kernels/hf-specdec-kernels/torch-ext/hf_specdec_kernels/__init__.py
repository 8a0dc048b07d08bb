"""
GPU kernels of tree speculative decoding.

Every operator has two versions: `naive.py`, plain PyTorch, which runs on a CPU, and `triton.py`, which runs on CUDA.
Operators are registered with `torch.library`, so that `torch.compile` can trace them; importing this package needs
only torch.
"""

from .budgets import BudgetedLevel, share_out
from .draft_losses import DraftLosses, draft_losses
from .draft_tokens import Children, draft_tokens, draw_children
from .kv_compaction import kv_compaction, pointer_table
from .merged_linear import merged_linear
from .overlaps import draft_overlaps
from .rejection_sampling import Walks, draft_columns, filter_logits, greedy_walk, rejection_walk, target_walk
from .tree_attention import pack_ancestors, tree_attention
from .tree_growth import ChosenNodes, best_paths, choose_nodes, tree_ancestors


__all__ = [
    "BudgetedLevel",
    "Children",
    "ChosenNodes",
    "DraftLosses",
    "Walks",
    "best_paths",
    "choose_nodes",
    "draft_columns",
    "draft_losses",
    "draft_overlaps",
    "draft_tokens",
    "draw_children",
    "filter_logits",
    "greedy_walk",
    "kv_compaction",
    "pack_ancestors",
    "merged_linear",
    "pointer_table",
    "rejection_walk",
    "share_out",
    "target_walk",
    "tree_ancestors",
    "tree_attention",
]
