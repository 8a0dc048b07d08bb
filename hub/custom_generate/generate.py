"""What `model.generate(custom_generate="<this repository>", trust_remote_code=True, …)` calls."""

from typing import Any

from transformers import GenerationMixin, PreTrainedModel


def generate(inputs: Any = None, generation_config: Any = None, *, model: PreTrainedModel, **options: Any) -> Any:
    """
    Generates as hf_specdec does after `import hf_specdec`, with trees of drafts; greedy texts are those of plain
    `generate`, sampled ones have its distribution.

    Args:
        inputs (`torch.Tensor`, *optional*): the prompts, as in `generate`; `input_ids=` does as well.
        generation_config (`GenerationConfig`, *optional*): as in `generate`; it may have `tree` and
            `speculative_config`.
        model (`PreTrainedModel`): the target.
        options (`Any`): arguments of `generate`, among them `assistant_model` (a model, a head, a Hub id, a folder,
            "ngram" or "mtp"), `tree` and `speculative_config`. Without a tree, the draft's default tree is used.

    Raises:
        ValueError: without `assistant_model`, and for what speculation does not cover.
    """
    from hf_specdec import SpeculativeConfig

    configs = (options, vars(generation_config or model.generation_config))
    if not any(config.get(name) is not None for config in configs for name in ("tree", "speculative_config")):
        options["speculative_config"] = SpeculativeConfig()
    # That of the mixin, which called this function: a model loaded from such a repository has this one as its own.
    return GenerationMixin.generate(model, inputs, generation_config, **options)
