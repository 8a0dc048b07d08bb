"""
Published checkpoints: reading them, and writing ours to the Hub.

- `reading`: a config and weights, from a folder or the Hub, of whatever format.
- `keys`, `vocabulary`, `layer_config`, `published`: parts of reading the formats of heads.
- `layer_fields`: the layers' config as a field of a head's.
- `pretrained`: `from_pretrained` of heads.
- `publishing`: `save_pretrained` and `push_to_hub` of heads with cards.
- `hub`: a folder with its model card, in one commit.
"""
