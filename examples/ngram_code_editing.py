"""
Editing code: most of what the model writes stands in the prompt, so that n-grams find it there.

    python examples/ngram_code_editing.py
    python examples/ngram_code_editing.py --file my_module.py --task "Add type hints to this code."
"""

from __future__ import annotations

from pathlib import Path

import common

import hf_specdec


CODE = """def moving_average(values, width):
    result = []
    for start in range(len(values) - width + 1):
        window = values[start : start + width]
        result.append(sum(window) / width)
    return result
"""


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=120)
    parser.add_argument("--file", type=Path, help="the code to edit")
    parser.add_argument("--task", default="Write this function again with a docstring, and change nothing else.")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    code = options.file.read_text(encoding="utf-8") if options.file else CODE
    inputs = common.encode(tokenizer, [f"{options.task}\n\n```python\n{code}```"], options.device)

    drafts = {
        "chain of 5": {"assistant_model": hf_specdec.NgramDraft(), "tree": hf_specdec.TokenTree.chain(5)},
        "no tree asked": {"assistant_model": hf_specdec.NgramDraft()},
        "long matches only": {"assistant_model": hf_specdec.NgramDraft(max_ngram=5, min_ngram=3)},
    }
    runs = common.compare(model, inputs, drafts, max_new_tokens=options.max_new_tokens)
    common.show(tokenizer, runs["no tree asked"])


if __name__ == "__main__":
    main()
