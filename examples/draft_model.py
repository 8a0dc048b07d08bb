"""
A smaller language model as the draft: a chain, a tree, and `tree="auto"`.

    python examples/draft_model.py --target HuggingFaceTB/SmolLM2-1.7B-Instruct \\
        --draft HuggingFaceTB/SmolLM2-135M-Instruct

Without `--draft` the target drafts for itself: every token is accepted and nothing is gained. `hf-specdec train --kind
draft` trains a small one.
"""

from __future__ import annotations

import common

import hf_specdec


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=60)
    parser.add_argument("--draft", help="Hub id or folder of a model with the target's vocabulary")
    parser.add_argument("--prompt", default="Why do leaves change their colour in autumn?")
    parser.add_argument("--sample", action="store_true", help="sample at temperature 0.7 instead of greedy decoding")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    draft = common.load(options.draft, options) if options.draft else model
    inputs = common.encode(tokenizer, [options.prompt], options.device)

    drafts = {
        "chain of 4": {"assistant_model": draft, "tree": hf_specdec.TokenTree.chain(4)},
        "tree of 6": {"assistant_model": draft, "tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
        "auto": {"assistant_model": draft, "tree": "auto"},
    }
    sampling = {"do_sample": True, "temperature": 0.7} if options.sample else {}
    runs = common.compare(model, inputs, drafts, max_new_tokens=options.max_new_tokens, **sampling)
    common.show(tokenizer, runs["tree of 6"])


if __name__ == "__main__":
    main()
