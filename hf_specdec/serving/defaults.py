"""Defaults of the server's limits, for the command as well, which shows them without importing the server."""

MOST_BODY_BYTES = 4 * 2**20
"""Most bytes of a request's body: several times a text of 128,000 tokens."""
STALL_SECONDS = 60.0
"""Seconds without the end of a forward after which an engine with work is unhealthy."""
MOST_IMAGE_BYTES = 10 * 2**20
"""Most bytes of an image's file."""
MOST_IMAGE_PIXELS = 4096 * 4096
"""Most pixels of an image."""
NO_IMAGES = "the model takes no images"
"""Why the messages of a request may have no images, if nothing else is said."""
