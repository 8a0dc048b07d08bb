"""
Forwards of a model over the nodes of a tree.

- `tree_forward`: one forward, into a cache.
- `node_inputs`: its inputs.
- `vocabulary`: forwards of a draft model whose vocabulary is padded otherwise.
- `features`: hidden states recorded meanwhile.
- `chunks`: widths of prompt chunks.
- `outputs`: what models return.
"""
