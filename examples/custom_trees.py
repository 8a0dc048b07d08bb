"""
The same call with trees of many kinds: chains, regular and irregular trees, dynamic ones, a schedule, "auto".

    python examples/custom_trees.py
    python examples/custom_trees.py --draft HuggingFaceTB/SmolLM2-135M-Instruct --tree "[(0,), (1,), (2,)]"
"""

from __future__ import annotations

import common

import hf_specdec


PROMPT = """Write this list again, in the same order, with a number in front of each line:

two bottles of milk
a loaf of rye bread
twelve brown eggs
three green apples
a bag of basmati rice"""


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=60)
    parser.add_argument("--draft", default="ngram", help="ngram, or Hub id or folder of a draft model")
    parser.add_argument("--tree", action="append", default=[], help="one more tree, as rank paths; repeatable")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    draft = hf_specdec.NgramDraft() if options.draft == "ngram" else common.load(options.draft, options)
    inputs = common.encode(tokenizer, [PROMPT], options.device)

    trees = {
        "chain of 2": hf_specdec.TokenTree.chain(2),
        "chain of 6": hf_specdec.TokenTree.chain(6),
        "branching 2, 2, 1": hf_specdec.TokenTree.from_branching((2, 2, 1)),
        "irregular": "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0)]",
        "dynamic": hf_specdec.DynamicTree(depth=6, top_k=3, num_nodes=12),
        "schedule": [(0, "[(0,)]"), (64, "[(0,), (1,), (0, 0), (0, 0, 0)]")],
        "auto": "auto",
    } | {text: text for text in options.tree}
    drafts = {name: {"assistant_model": draft, "tree": tree} for name, tree in trees.items()}
    common.compare(model, inputs, drafts, max_new_tokens=options.max_new_tokens)


if __name__ == "__main__":
    main()
