"""
CUDA graphs of forwards over trees: at small batch the host launches a forward more slowly than the device computes it.

A `GraphStore` holds the K/V of a model for one batch size and capacity, and the graphs that were captured over them,
so that calls with other prompts replay them. A store is freed with its model. Everything that differs from step to
step is copied into the graph's own tensors first: tokens, positions, slots to write, masks over all slots, other
inputs. A forward is captured when its shape comes for the second time; where that fails, the model goes on without
graphs.
"""

from .capturing import RECORDERS, GraphPool, Record, compile_kernels, end_compilation, record_cuda_graph
from .experts import with_captured_experts
from .forwards import CapturedForward, RecordedForward, StaticContext
from .obstacles import fingerprint_of, obstacle_to_graphs, reason_of, warn_of_failed_capture
from .stores import GraphLoans, GraphStore, graph_loans
from .streams import Branch


__all__ = [
    "RECORDERS",
    "Branch",
    "CapturedForward",
    "GraphLoans",
    "GraphPool",
    "GraphStore",
    "Record",
    "RecordedForward",
    "StaticContext",
    "compile_kernels",
    "end_compilation",
    "fingerprint_of",
    "graph_loans",
    "obstacle_to_graphs",
    "record_cuda_graph",
    "reason_of",
    "warn_of_failed_capture",
    "with_captured_experts",
]
