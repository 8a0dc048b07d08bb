"""
Models compiled by `torch.compile`.

- `layers`: the whole model, or its layers.
- `one_row`: layers that see the tokens of all rows as those of one.
- `merged_linears`: linear layers merged in what is compiled.
- `early_launch`: kernels that are launched early in it.
- `kept`, `preparation`: compiled code on disk, and what compiling needs, begun early.
"""
