"""What logits processors of transformers look at, which decides how the rows of a batch can share them."""

from __future__ import annotations

from transformers import LogitsProcessorList
from transformers.generation import logits_process


def _types(*names: str) -> frozenset[type]:
    """Processor classes of transformers, as far as the installed version has them."""
    return frozenset(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# Exact classes only: a subclass may do anything.
READS_SCORES_ONLY = _types(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
)
READS_OWN_HISTORY = _types(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)
HOLDS_ROWS = _types(
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
)
ASKS_BY_ROW = _types("PrefixConstrainedLogitsProcessor")
HOLDS_CONTEXT = _types("UnbatchedClassifierFreeGuidanceLogitsProcessor")
NOTES_ROWS = _types("WhisperNoSpeechDetection")


def warpers_of(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors that read the scores alone: a draft that draws its tokens applies them, too."""
    return LogitsProcessorList(processor for processor in processors if type(processor) in READS_SCORES_ONLY)
