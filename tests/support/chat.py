"""A tokenizer with a chat template, one token per word or mark."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


TEMPLATE = (
    "{% for message in messages %}<start><{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start><assistant>{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """61 tokens: `<pad>`, marks of turns, and the words w0, w1, …, written with spaces between them."""
    marks = ["<pad>", "<start>", "<end>", "<unk>", "<user>", "<assistant>", "<system>"]
    vocab = {word: index for index, word in enumerate(marks + [f"w{index}" for index in range(54)])}
    tokenizer = Tokenizer(WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(marks)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
