"""
The name under which the operators are registered. A build for the Hub has another file in this place, whose name is
unique to it, so that several versions can be loaded side by side.
"""

import torch


NAMESPACE = "hf_specdec_kernels"

ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of an operator."""
    return f"{NAMESPACE}::{op_name}"
