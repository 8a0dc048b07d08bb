"""
GPU kernels of tree speculative decoding.

Every operator has two versions: `naive.py`, plain PyTorch, which runs on a CPU, and `triton.py`, which runs on CUDA.
Operators are registered with `torch.library`, so that `torch.compile` can trace them; importing this package needs
only torch.
"""

from .budgets import BudgetedLevel, share_out
from .compilation import compile_kernels_of, end_compilation, operators_are_resting, operators_rest
from .draft_losses import DraftLosses, draft_losses
from .draft_tokens import Children, draft_tokens, draw_children, exponential_noise
from .gated_product import gated_product
from .gated_rms_norm import gated_rms_norm
from .kv_compaction import kv_compaction, pointer_table
from .kv_writes import write_kv
from .merged_linear import merged_linear
from .overlaps import draft_overlaps
from .pair_lists import PairLists, pair_lists
from .pending import DeltaPending, PendingPath, ScanPending
from .rejection_sampling import (
    Walks,
    chosen_walk,
    draft_columns,
    filter_logits,
    greedy_walk,
    rejection_walk,
    target_walk,
)
from .rms_norm import rms_norm
from .rotary import rotary
from .tree_attention import pack_ancestors, tree_attention
from .tree_conv import commit_conv, conv_table, tree_conv
from .tree_delta_rule import commit_delta_rule, tree_delta_rule
from .tree_growth import ChosenNodes, best_paths, choose_nodes, tree_ancestors
from .tree_selective_scan import commit_selective_scan, tree_selective_scan
from .tree_ssd import commit_ssd, tree_ssd


__all__ = [
    "BudgetedLevel",
    "Children",
    "ChosenNodes",
    "DeltaPending",
    "DraftLosses",
    "PairLists",
    "PendingPath",
    "ScanPending",
    "Walks",
    "best_paths",
    "choose_nodes",
    "chosen_walk",
    "commit_conv",
    "commit_delta_rule",
    "commit_selective_scan",
    "commit_ssd",
    "compile_kernels_of",
    "conv_table",
    "draft_columns",
    "draft_losses",
    "draft_overlaps",
    "draft_tokens",
    "draw_children",
    "end_compilation",
    "exponential_noise",
    "filter_logits",
    "gated_product",
    "gated_rms_norm",
    "greedy_walk",
    "kv_compaction",
    "pack_ancestors",
    "merged_linear",
    "operators_are_resting",
    "operators_rest",
    "pair_lists",
    "pointer_table",
    "rejection_walk",
    "rms_norm",
    "rotary",
    "share_out",
    "target_walk",
    "tree_ancestors",
    "tree_attention",
    "tree_conv",
    "tree_delta_rule",
    "tree_selective_scan",
    "tree_ssd",
    "write_kv",
]
