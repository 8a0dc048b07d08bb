"""
Plain `generate` beside `generate(assistant_model=NgramDraft())`: drafts without a model, looked up in the text itself.

    python examples/quickstart.py
    python examples/quickstart.py --target HuggingFaceTB/SmolLM2-1.7B-Instruct --prompt "…"
"""

from __future__ import annotations

import common

import hf_specdec


PROMPT = """Put a title in front of this text, and change nothing else:

The old lighthouse stood on a cliff above the bay. Every evening the keeper climbed its two hundred steps, cleaned \
the lamp and lit it. The lamp could be seen from fifteen miles away, and the fishermen of the bay relied on it."""


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--draft", default="ngram", help="ngram, or Hub id or folder of a draft model")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    inputs = common.encode(tokenizer, [options.prompt], options.device)

    if options.draft == "ngram":
        speculation = {"assistant_model": hf_specdec.NgramDraft()}
    else:
        speculation = {
            "assistant_model": common.load(options.draft, options),
            "tree": "[(0,), (1,), (0, 0), (0, 0, 0)]",
        }
    runs = common.compare(model, inputs, {options.draft: speculation}, max_new_tokens=options.max_new_tokens)
    common.show(tokenizer, runs[options.draft])


if __name__ == "__main__":
    main()
