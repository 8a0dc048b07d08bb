"""
Benchmarks of drafts and trees: `hf-specdec bench` and `hf-specdec tune`.

All benchmarks use one method. The contenders run in one process, in turn; greedy texts are compared with plain
`generate` in float32 before anything is timed; tokens are counted from their ids; a speed-up is a contender's total
tokens / total seconds divided by the reference's.
"""
