"""
A batch of prompts of different lengths: rows accept different numbers of tokens, and drafting stops under load.

    python examples/batch.py
"""

from __future__ import annotations

import common

import hf_specdec


PROMPTS = [
    "Repeat these words twice: apple, lamp, river, stone, cloud, paper, chair.",
    "Count from one to twenty in words.",
    "Write down the alphabet, then write it down again.",
    "Repeat after me, word for word: the quick brown fox jumps over the lazy dog, and the dog sleeps on.",
]


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=60)
    parser.add_argument("--draft", help="Hub id or folder of a draft model; default: n-grams")
    parser.add_argument("--disable-by-batch-size", type=int, default=2, help="draft with at most so many rows")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    draft = common.load(options.draft, options) if options.draft else hf_specdec.NgramDraft()
    inputs = common.encode(tokenizer, PROMPTS, options.device)

    tree = "[(0,), (1,), (0, 0), (0, 0, 0)]"
    limited = hf_specdec.SpeculativeConfig(tree=tree, disable_by_batch_size=options.disable_by_batch_size)
    drafts = {
        "always": {"assistant_model": draft, "tree": tree},
        f"up to {options.disable_by_batch_size} rows": {"assistant_model": draft, "speculative_config": limited},
    }
    runs = common.compare(model, inputs, drafts, max_new_tokens=options.max_new_tokens)
    accepted = hf_specdec.last_metrics().accepted_per_step
    print("\nsteps of every row:", ", ".join(str(len(steps)) for steps in accepted))
    common.show(tokenizer, runs["always"])


if __name__ == "__main__":
    main()
