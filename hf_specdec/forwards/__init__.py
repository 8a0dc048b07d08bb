"""
Forwards of a model over the nodes of a tree.

- `tree_forward`: one forward, into a cache: positions, masks, and whether kernels or a graph run it.
- `model_call`: the call of the model, with the arguments that it takes.
- `node_inputs`: inputs of a forward.
- `vocabulary`: forwards of a draft model whose vocabulary is padded otherwise.
- `features`: hidden states recorded meanwhile.
- `chunks`: widths of prompt chunks.
- `outputs`: what models return.
"""
