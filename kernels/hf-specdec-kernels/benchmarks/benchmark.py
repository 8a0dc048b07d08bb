"""
Runs the benchmarks of P6 and P7; the last line of the output is JSON.

    python benchmarks/benchmark.py
"""

from __future__ import annotations

import json

import benchmark_rejection_sampling
import benchmark_tree_attention


if __name__ == "__main__":
    found = {"P6": benchmark_tree_attention.main(), "P7": benchmark_rejection_sampling.main()}
    print(json.dumps(found))
