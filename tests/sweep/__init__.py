"""
A sweep over transformers' own registry: every class that writes text, tiny but with the structure of published
models, runs greedy with trees and batches beside plain `generate`. `python -m tests.sweep` runs it and writes the
table of docs/compatibility.md; `make test-sweep` runs it as tests.
"""
