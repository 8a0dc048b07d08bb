"""
What a step does, for one call of `generate` and for requests in flight.

- `sequences`: the rows of a call and their texts.
"""
