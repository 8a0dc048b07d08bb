"""
Models compiled by `torch.compile`.

- `layers`: the whole model, or its layers.
- `merged_linears`: linear layers merged in what is compiled.
- `early_launch`: kernels that are launched early in it.
"""
