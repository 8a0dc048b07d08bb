"""
An EAGLE head as the draft, with no tree asked for, with a static tree, and sampling.

    python examples/eagle_head.py --target meta-llama/Llama-3.1-8B-Instruct \\
        --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --dtype bfloat16

`examples/train_head.py` trains one for SmolLM2.
"""

from __future__ import annotations

import common

import hf_specdec


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--draft", default="head", help="Hub id or folder of the head, in any published format")
    parser.add_argument("--prompt", default="Why do leaves change their colour in autumn?")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    try:
        head = hf_specdec.EagleHead.from_pretrained(options.draft).to(options.device)
    except OSError as error:
        parser.error(f"--draft {options.draft}: {error} Train one with examples/train_head.py.")
    inputs = common.encode(tokenizer, [options.prompt], options.device)

    drafts = {
        "no tree asked": {"assistant_model": head},
        "tree of 6": {"assistant_model": head, "tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    }
    print("greedy")
    common.compare(model, inputs, drafts, max_new_tokens=options.max_new_tokens)
    print("\nsampling: children are drawn from the head's distribution, and tested with it")
    runs = common.compare(model, inputs, drafts, max_new_tokens=options.max_new_tokens, do_sample=True)
    common.show(tokenizer, runs["no tree asked"])


if __name__ == "__main__":
    main()
