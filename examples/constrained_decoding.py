"""
Constrained decoding with a processor that has state: the answer must be a list of numbers, such as `[3, 14, 15]`.

    python examples/constrained_decoding.py

Every node of a tree is processed with its own history, so that such a processor needs to know nothing of trees. The
draft knows nothing of the constraint; what it proposes against it is not accepted.
"""

from __future__ import annotations

import re

import common
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

import hf_specdec


class NumberList(LogitsProcessor):
    """
    Lets through only what keeps the text behind the prompt the beginning of `[number, number, …]`, with at most
    `most` numbers of up to three digits; behind the closing bracket, only the end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, most: int = 8):
        self.tokenizer, self.prompt_length, self.most = tokenizer, prompt_length, most
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        self.texts = {token: text for token, text in enumerate(texts) if re.fullmatch(r"[\d,\[\] ]{1,4}", text)}
        self.allowed: dict[str, list[int]] = {}  # state: what may follow a text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids):
            allowed = self._allowed_after(self.tokenizer.decode(ids[self.prompt_length :]))
            masked[row, allowed] = scores[row, allowed]
        return masked

    def _allowed_after(self, text: str) -> list[int]:
        if text not in self.allowed:
            found = [token for token, more in self.texts.items() if self._may_begin(text + more)]
            self.allowed[text] = found or [self.tokenizer.eos_token_id]
        return self.allowed[text]

    def _may_begin(self, text: str) -> bool:
        number = r"[1-9]\d{0,2}"
        complete = rf"\[{number}(, {number}){{0,{self.most - 1}}}\]"
        begun = rf"\[({number}(, {number}){{0,{self.most - 1}}}((?<=\d),( )?)?)?"
        if text.count(",") > self.most - 1:
            return False
        return bool(re.fullmatch(complete, text) or re.fullmatch(begun, text))


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=40)
    parser.add_argument("--draft", help="Hub id or folder of a draft model; default: the target itself")
    parser.add_argument("--prompt", default="List the first prime numbers.")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    draft = common.load(options.draft, options) if options.draft else model
    inputs = common.encode(tokenizer, [options.prompt], options.device)

    processor = NumberList(tokenizer, inputs["input_ids"].shape[1])
    runs = common.compare(
        model,
        inputs,
        {
            "n-gram tree": {"assistant_model": hf_specdec.NgramDraft()},
            "draft, tree of 5": {"assistant_model": draft, "tree": "[(0,), (1,), (2,), (0, 0), (0, 0, 0)]"},
        },
        max_new_tokens=options.max_new_tokens,
        logits_processor=LogitsProcessorList([processor]),
    )
    common.show(tokenizer, runs["draft, tree of 5"])


if __name__ == "__main__":
    main()
