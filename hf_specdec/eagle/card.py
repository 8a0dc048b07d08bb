"""The model card of a head: what it is, how to use it, what was measured."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


if TYPE_CHECKING:
    from ..metrics import SpeculationMetrics
    from .modeling_eagle import EagleHead

LIBRARY = "hf_specdec"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """
    What was measured with a head, on one set of prompts with one tree.

    Args:
        dataset (`str`): the prompts, such as "MT-bench".
        tree (`str`): the tree, as `tree=` takes it, or its description.
        mean_acceptance_length (`float`): tokens per step, the bonus token included.
        draft_acceptance_rate (`float`, *optional*): accepted / drafted tokens.
        tokens_per_second (`float`, *optional*): with the head.
        plain_tokens_per_second (`float`, *optional*): of plain `generate` in the same setting.
        temperature (`float`, *optional*, defaults to 0.0): 0: greedy.
        batch_size (`int`, *optional*, defaults to 1): requests at a time.
        dtype (`str`, *optional*): of the target.
        hardware (`str`, *optional*): what it ran on.
        dataset_id (`str`, *optional*): the prompts' Hub id.
    """

    dataset: str
    tree: str
    mean_acceptance_length: float
    draft_acceptance_rate: float | None = None
    tokens_per_second: float | None = None
    plain_tokens_per_second: float | None = None
    temperature: float = 0.0
    batch_size: int = 1
    dtype: str | None = None
    hardware: str | None = None
    dataset_id: str | None = None

    @classmethod
    def from_metrics(cls, metrics: SpeculationMetrics, **fields: Any) -> Measurement:
        """A measurement with the acceptance of `hf_specdec.last_metrics()`."""
        return cls(
            mean_acceptance_length=metrics.mean_acceptance_length,
            draft_acceptance_rate=metrics.draft_acceptance_rate,
            **fields,
        )

    @property
    def speed_up(self) -> float | None:
        """Tokens per second relative to plain `generate`; None if either was not measured."""
        if not self.tokens_per_second or not self.plain_tokens_per_second:
            return None
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def setting(self) -> dict[str, Any]:
        """What has to be equal for figures to be compared."""
        setting = {"tree": self.tree, "temperature": self.temperature, "batch_size": self.batch_size}
        optional = {"dtype": self.dtype, "hardware": self.hardware}
        return setting | {name: value for name, value in optional.items() if value is not None}

    def eval_results(self) -> list[EvalResult]:
        """The figures, for the card's model-index."""
        figures = {
            "mean_acceptance_length": ("Mean acceptance length (bonus token included)", self.mean_acceptance_length),
            "draft_acceptance_rate": ("Draft acceptance rate", self.draft_acceptance_rate),
            "tokens_per_second": ("Tokens per second", self.tokens_per_second),
            "speed_up": ("Speed-up over plain generate", self.speed_up),
        }
        return [
            EvalResult(
                task_type="text-generation",
                task_name="Text generation",
                dataset_type=self.dataset_id or re.sub(r"\W+", "-", self.dataset.lower()).strip("-"),
                dataset_name=self.dataset,
                metric_type=kind,
                metric_name=name,
                metric_value=round(value, 4),
                metric_args=self.setting,
            )
            for kind, (name, value) in figures.items()
            if value is not None
        ]


def model_card(
    head: EagleHead,
    repo_id: str | None = None,
    *,
    measurements: Sequence[Measurement] = (),
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """
    The card of a head.

    Args:
        head (`EagleHead`): the head. Of its config, `target_name` and `recipe` are used.
        repo_id (`str`, *optional*): where it will be.
        measurements (`Sequence[Measurement]`, *optional*): acceptance and speed, also for the model-index.
        license (`str`, *optional*), language (`str` or `list[str]`, *optional*), datasets (`list[str]`, *optional*):
            the card's fields of these names.
        tags (`Sequence[str]`, *optional*): added to ours.
    """
    config = head.config
    kind = "eagle3" if config.eagle_version == 3 else "eagle"
    results = [result for measurement in measurements for result in measurement.eval_results()]
    data = ModelCardData(
        base_model=config.target_name if _is_repo_id(config.target_name) else None,
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", kind, *tags],
        license=license,
        language=language,
        datasets=datasets,
        model_name=(repo_id or "head").split("/")[-1] if results else None,
        eval_results=results or None,
    )
    sections = [
        _title(head, repo_id),
        _usage(head, repo_id),
        _measured(measurements),
        _facts(head),
        _recipe(config.recipe),
        _conventions(config.conventions),
    ]
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def _is_repo_id(name: str | None) -> bool:
    """Whether a target's name can be a Hub repository; folders of the machine that trained must not be published."""
    if not name or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _target(head: EagleHead) -> str:
    return head.config.target_name if _is_repo_id(head.config.target_name) else "the target"


def _title(head: EagleHead, repo_id: str | None) -> str:
    name = (repo_id or "EAGLE head").split("/")[-1]
    version = "EAGLE-3" if head.config.eagle_version == 3 else "EAGLE"
    target = _target(head)
    target = f"[{target}](https://huggingface.co/{target})" if target != "the target" else "its target model"
    return (
        f"# {name}\n\nAn {version} head for speculative decoding with {target}. It drafts a tree of tokens that the "
        "target then verifies in one forward pass; the text is distributed as without it, and comes sooner."
    )


def _usage(head: EagleHead, repo_id: str | None) -> str:
    target = _target(head)
    return f"""## How to use

```bash
pip install hf-specdec
```

```python
import hf_specdec
from transformers import AutoModelForCausalLM, AutoTokenizer

target_name = "{target}"
tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name, dtype="auto", device_map="auto")
head = hf_specdec.EagleHead.from_pretrained("{repo_id or "this repository"}").to(target.device)

messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = target.generate(**inputs.to(target.device), assistant_model=head, max_new_tokens=256)
print(tokenizer.decode(output[0], skip_special_tokens=True))
print(hf_specdec.last_metrics().mean_acceptance_length)
```"""


def _measured(measurements: Sequence[Measurement]) -> str:
    if not measurements:
        return ""
    rows = [
        "| prompts | setting | mean acceptance length | acceptance rate | tokens/s | plain tokens/s | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for measurement in measurements:
        setting = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in measurement.setting.items())
        figures = (
            (measurement.mean_acceptance_length, ".2f"),
            (measurement.draft_acceptance_rate, ".3f"),
            (measurement.tokens_per_second, ".1f"),
            (measurement.plain_tokens_per_second, ".1f"),
            (measurement.speed_up, ".2f"),
        )
        cells = ["" if value is None else format(value, digits) for value, digits in figures]
        rows.append(f"| {' | '.join([measurement.dataset, setting, *cells])} |")
    note = "Mean acceptance length is tokens per step, the target's own token included."
    return "\n".join(["## Measured", "", *rows, "", note])


def _facts(head: EagleHead) -> str:
    config, layers = head.config, head.config.text_config
    facts = {
        "parameters": f"{sum(parameter.numel() for parameter in head.parameters()) / 1e6:.1f} M",
        "dtype": str(head.dtype).removeprefix("torch."),
        "decoder layers": f"{layers.num_hidden_layers} ({layers.model_type}), hidden size {config.hidden_size}",
        "reads": _features(config),
        "drafts": f"{config.num_draft_tokens} of {config.vocab_size} tokens",
    }
    if config.default_tree is not None:
        facts["default tree"] = f"`{config.default_tree}`"
    return "\n".join(
        ["## The head", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
    )


def _features(config: Any) -> str:
    if config.num_aux_features == 0:
        return "the target's last hidden state, after its final norm"
    if config.aux_layer_ids is None:
        return "the target's hidden states 2, L/2 and L−3 of L layers"
    return f"the target's hidden states {config.aux_layer_ids} ({config.aux_layer_convention})"


def _recipe(recipe: dict[str, Any] | None) -> str:
    if not recipe:
        return ""
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in recipe.items()]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *rows])


def _conventions(conventions: dict[str, str] | None) -> str:
    if not conventions:
        return ""
    rows = [f"- `{name}`: {reason}" for name, reason in conventions.items()]
    return "\n".join(["## Assumed when the original checkpoint was read", "", *rows])
