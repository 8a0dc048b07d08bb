"""
Namespace in which the operators are registered. A build for the Hub (see `build.py`) replaces it by one that is unique
to the build, so that several versions can be loaded in one process.
"""

import torch


NAMESPACE = "hf_specdec_kernels"

ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The name of an operator with its namespace."""
    return f"{NAMESPACE}::{op_name}"
