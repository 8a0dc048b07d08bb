"""What the configs of heads of all kinds derive from their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class HeadSizes:
    """Sizes of a head, from the config of its decoder layers and what it reads of its target."""

    if TYPE_CHECKING:
        text_config: Any
        target_hidden_size: int | None
        num_aux_features: int | None
        draft_vocab_size: int | None

    @property
    def hidden_size(self) -> int:
        """H, the head's hidden size."""
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.text_config.vocab_size

    @property
    def feature_size(self) -> int:
        """Width of the target's features that the head reads, `num_aux_features` · Ht, or Ht without any."""
        return (self.num_aux_features or 1) * (self.target_hidden_size or self.hidden_size)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the head can propose."""
        return self.draft_vocab_size or self.vocab_size
