"""
Published checkpoints: reading them, and writing ours to the Hub.

- `reading`: a config and weights, from a folder or the Hub, of whatever format.
- `pretrained`: `from_pretrained` of heads.
- `hub`: a folder with its model card, in one commit.
"""
