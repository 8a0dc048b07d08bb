"""An OpenAI-compatible server: transformers' own, with requests that speculate behind it."""
