"""Training of EAGLE heads and small draft models."""
