"""This library beside transformers, vLLM, SGLang and SafeAILab's EAGLE; see benchmarks/compare_peers.py."""
