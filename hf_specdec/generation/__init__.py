"""
The loop of a speculative `generate` call, from what `hooks` pass on to what comes back.

- `calls`, `arguments`: entry point of a call behind the hooks, and what it is given.
- `refusals`, `model_refusals`, `draft_refusals`, `state_refusals`: calls and models that cannot be served.
- `loop`: propose, score, accept, commit.
- `target`, `prefill`: the target in one call.
- `rows`, `stopping`, `recording`: the rows, where they end, what is returned besides tokens.
"""
