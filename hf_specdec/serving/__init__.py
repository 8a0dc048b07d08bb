"""An OpenAI-compatible server: transformers' own HTTP server in front of an engine with speculation."""
