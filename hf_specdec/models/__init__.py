"""
What models of transformers are like, for code that runs any of them.

- `structure`: what a forward takes, where it runs, layers and their sizes.
- `modules`: all modules, parameters and buffers.
- `hooks`: hooks of a user's own.
- `positions`: how many positions models know; `own_positions`: positions that they choose by themselves; `rope`.
- `probe`: what a forward does, found by running it; `shadow`: the same model on the "meta" device.
"""
