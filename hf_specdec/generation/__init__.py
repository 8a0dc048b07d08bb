"""
The loop of a speculative `generate` call, from the hook in transformers to what comes back.

- `hook`, `importing`: how `generate` becomes ours, once transformers is loaded.
- `calls`, `arguments`: entry point of a call behind the hook, and what it is given.
- `refusals`, `model_refusals`: calls and models that cannot be served.
- `loop`: propose, score, accept, commit.
- `target`, `prefill`: the target in one call.
- `rows`, `stopping`, `recording`: the rows, where they end, what is returned besides tokens.
"""
