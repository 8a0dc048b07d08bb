"""
Int8 weights, by torchao: a quantized target with drafts, and a quantized copy that drafts for the model itself.

    python examples/quantized.py
    python examples/quantized.py --draft model_cards/SmolLM2-135M-Instruct-EAGLE3

The text is that of the model that verifies: of the quantized one in the first table, of the other in the second. On
most CPUs a copy in int8 costs as much as its target; it shows how often rounded weights guess right. Where
*activations* are rounded, too, plain decoding itself depends on how many tokens a forward has (docs/losslessness.md).
Needs `torchao` (`pip install 'hf-specdec[quantized]'`).
"""

from __future__ import annotations

import argparse

import common
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

import hf_specdec
from hf_specdec.smollm2 import smollm2_folder


TREE = "[(0,), (1,), (0, 0), (0, 0, 0)]"


def load_in_int8(options: argparse.Namespace) -> PreTrainedModel:
    """The target with int8 weights in its linear layers; activations stay as they are."""
    model = AutoModelForCausalLM.from_pretrained(
        options.target or smollm2_folder(),
        dtype=getattr(torch, options.dtype),
        quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
        device_map=options.device,
    )
    return model.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=60)
    parser.add_argument("--draft", help="folder or Hub id of an EAGLE head of the target")
    parser.add_argument("--prompt", default="Why do leaves change their colour in autumn?")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    quantized = load_in_int8(options)
    inputs = common.encode(tokenizer, [options.prompt], options.device)

    print("the target in int8")
    drafts = {
        "n-gram tree": {"assistant_model": hf_specdec.NgramDraft()},
        "as it was": {"assistant_model": model, "tree": TREE},
    }
    if options.draft is not None:
        head = hf_specdec.EagleHead.from_pretrained(options.draft).to(options.device)
        drafts["head"] = {"assistant_model": head}
    common.compare(quantized, inputs, drafts, max_new_tokens=options.max_new_tokens)

    print("\nthe target as it was")
    runs = common.compare(
        model,
        inputs,
        {"int8 copy": {"assistant_model": quantized, "tree": TREE}},
        max_new_tokens=options.max_new_tokens,
    )
    common.show(tokenizer, runs["int8 copy"])


if __name__ == "__main__":
    main()
