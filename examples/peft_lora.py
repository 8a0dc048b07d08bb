"""
A target with a LoRA adapter. Drafts: the model as it was before finetuning, and n-grams.

    python examples/peft_lora.py
    python examples/peft_lora.py --target … --adapter folder-or-hub-id

Without `--adapter` a small random one stands in for a trained one. A draft without the adapter costs as much as the
target, so nothing is gained in time; it shows how often the model before finetuning guesses right. Needs `peft`.
"""

from __future__ import annotations

import common
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

import hf_specdec


def random_adapter(model: PreTrainedModel, strength: float = 0.02) -> PeftModel:
    """The model with an adapter of random weights; a new one would change nothing."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * strength)
    return adapted.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=60)
    parser.add_argument("--adapter", help="folder or Hub id of a LoRA adapter for the target")
    parser.add_argument("--draft", help="Hub id or folder of the draft model; default: the target without adapter")
    parser.add_argument("--prompt", default="Why do leaves change their colour in autumn?")
    options = parser.parse_args(arguments)
    base, tokenizer = common.load_target(options)
    draft = common.load(options.draft or options.target, options)
    model = PeftModel.from_pretrained(base, options.adapter).eval() if options.adapter else random_adapter(base)
    inputs = common.encode(tokenizer, [options.prompt], options.device)

    drafts = {
        "without adapter": {"assistant_model": draft, "tree": "[(0,), (1,), (0, 0), (0, 0, 0)]"},
        "n-gram tree": {"assistant_model": hf_specdec.NgramDraft()},
    }
    runs = common.compare(model, inputs, drafts, max_new_tokens=options.max_new_tokens)
    common.show(tokenizer, runs["without adapter"])


if __name__ == "__main__":
    main()
