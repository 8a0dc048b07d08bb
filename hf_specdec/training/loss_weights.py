"""What is summed for a predicted token of a block head."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """
    Weights of what is summed for a predicted token, with q the head's distribution and p the target's.

    Args:
        cross_entropy (`float`): −log q of the text's token.
        divergence (`float`): −Σ p log q, the cross-entropy with p in place of one token drawn from it.
        distance (`float`): ‖p − q‖₁, twice the probability that the target rejects a token that the head draws.
        confidence (`float`): binary cross-entropy of the head's confidence with 1 − ½ ‖p − q‖₁.
    """

    cross_entropy: float = 0.0
    divergence: float = 0.0
    distance: float = 0.0
    confidence: float = 0.0

    @classmethod
    def parse(cls, text: str) -> LossWeights:
        """
        Reads weights by name; those that are not named are 0.

        ```python
        >>> from hf_specdec.training.loss_weights import LossWeights

        >>> LossWeights.parse("divergence=1, distance=0.5")
        LossWeights(cross_entropy=0.0, divergence=1.0, distance=0.5, confidence=0.0)

        ```

        Raises:
            ValueError: for an unknown name or one given twice, a value that is no number or negative, and weights that
                leave nothing to learn from.
        """
        names, weights = [field.name for field in fields(cls)], dict[str, float]()
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name in weights:
                raise ValueError(f"`loss_weights`={text!r} gives {name!r} twice: give it once.")
            try:
                weights[name] = float(value)
            except ValueError:
                weights[name] = -1.0
            if name not in names or not 0 <= weights[name] < float("inf"):
                raise ValueError(
                    f"`loss_weights`={text!r}: {part.strip()!r} is not one of {', '.join(names)} with a weight, such "
                    "as 'divergence=1,distance=0.5,confidence=1'."
                )
        if not any(weight for name, weight in weights.items() if name != "confidence"):
            raise ValueError(
                f"`loss_weights`={text!r} leaves nothing to learn from: give cross_entropy, divergence or distance a "
                "weight of more than 0."
            )
        return cls(**weights)


WEIGHTS = {
    "dflash": LossWeights(cross_entropy=1.0),
    "dspark": LossWeights(cross_entropy=0.1, distance=0.9, confidence=1.0),
}
"""The weights of each kind's publication."""
