"""
From a target to a head that drafts for it: the target writes texts, a head learns from them, `generate` uses it.

    python examples/train_head.py --texts 2000 --max-seconds 3000

Run again, it continues where it stopped. A useful head takes some ten thousand texts, and a GPU; `hf-specdec train
--help` has all options. Needs `accelerate` (`pip install 'hf-specdec[train]'`).
"""

from __future__ import annotations

import common

import hf_specdec
from hf_specdec.training import TrainOptions, train


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=60)
    parser.add_argument("--output", default="head", help="folder of the head, its data and its checkpoints")
    parser.add_argument("--texts", type=int, default=2000, help="conversations that the target writes")
    parser.add_argument("--max-length", type=int, default=512, help="most tokens of a text")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch-tokens", type=int, help="tokens of an optimizer step; by default as the data allows")
    parser.add_argument("--max-seconds", type=float, help="stop after so long; the same command continues")
    parser.add_argument("--prompt", default="Why do leaves change their colour in autumn?")
    options = parser.parse_args(arguments)

    result = train(
        TrainOptions(
            output=options.output,
            target=options.target,
            self_generate=options.texts,
            max_length=options.max_length,
            eval_texts=min(64, options.texts // 8),
            epochs=options.epochs,
            batch_tokens=options.batch_tokens,
            max_seconds=options.max_seconds,
            cpu=options.device == "cpu",
        ),
        report=print,
    )
    if not result.finished:
        print(f"Stopped at step {result.step} of {result.total_steps}. The same command continues.")
        return
    for name, run in (("before", result.before), ("after", result.after)):
        print(f"{name}: simulated acceptance length on held-out texts {run['eval_acceptance_length']:.2f}")

    model, tokenizer = common.load_target(options)
    head = hf_specdec.EagleHead.from_pretrained(options.output).to(options.device)
    inputs = common.encode(tokenizer, [options.prompt], options.device)
    runs = common.compare(
        model, inputs, {"the head": {"assistant_model": head}}, max_new_tokens=options.max_new_tokens
    )
    common.show(tokenizer, runs["the head"])


if __name__ == "__main__":
    main()
