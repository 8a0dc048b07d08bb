"""
Layers of a model whose element-wise operations are fused without `torch.compile`: RMSNorm, rotary embedding and gated
products run by a kernel each, where a module computes what the kernel does.
"""

from .switch import fused_layers, modules_kept, own_layers


__all__ = ["fused_layers", "modules_kept", "own_layers"]
