"""
Requests that come and go, each with options of its own, and what a step of theirs yields.

    python examples/many_requests.py
"""

from __future__ import annotations

import common

import hf_specdec


PROMPTS = [
    "Repeat these words twice: apple, lamp, river, stone, cloud, paper, chair.",
    "Count from one to twenty in words.",
    "Say hello.",
    "Repeat after me, word for word: the quick brown fox jumps over the lazy dog, and the dog sleeps on.",
]


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__, max_new_tokens=60)
    parser.add_argument("--draft", help="Hub id or folder of a draft model; default: n-grams")
    options = parser.parse_args(arguments)
    model, tokenizer = common.load_target(options)
    draft = common.load(options.draft, options) if options.draft else hf_specdec.NgramDraft()
    prompts = [common.encode(tokenizer, [prompt], options.device) for prompt in PROMPTS]

    config = hf_specdec.SpeculativeConfig(tree="[(0,), (1,), (0, 0), (0, 0, 0)]", disable_by_batch_size=3)
    with model.init_continuous_batching(assistant_model=draft, speculative_config=config) as manager:
        names = [
            manager.add_request(
                prompt["input_ids"][0].tolist(),
                max_new_tokens=options.max_new_tokens // (1 + number % 2),  # every second one ends early
                do_sample=False,
            )
            for number, prompt in enumerate(prompts)
        ]
        sampled = manager.add_request(
            prompts[2]["input_ids"][0].tolist(), max_new_tokens=20, do_sample=True, temperature=0.8, seed=1
        )
        results = [manager.get_result(name) for name in names]
        print("with a seed:", tokenizer.decode(manager.get_result(sampled).generated_tokens))

    for prompt, result in zip(prompts, results, strict=True):
        alone = model.generate(**prompt, do_sample=False, max_new_tokens=len(result.generated_tokens))
        text = alone[0, prompt["input_ids"].shape[1] :].tolist()
        steps = len(result.speculation.accepted_per_step[0])
        print(
            f"{result.request_id}: {len(text)} tokens in {steps} steps, "
            f"identical to generate alone: {'yes' if text == result.generated_tokens else 'no'}"
        )
    print(manager.state)


if __name__ == "__main__":
    main()
