"""
Forwards of a model over the nodes of a tree.

- `tree_forward`: one forward, into a cache.
- `node_inputs`: its inputs.
- `features`: hidden states recorded meanwhile.
- `chunks`: widths of prompt chunks.
- `compiling`: models compiled by `torch.compile`; `merged_linears`: linear layers merged there;
  `overlapping`: kernels launched early there.
- `own_positions`: positions that models choose by themselves.
- `positions`: how many positions models know.
- `models`, `modules`, `rope`: what a model takes and has.
"""
