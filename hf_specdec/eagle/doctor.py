"""
What is wrong with a head: how it was read, and how often it agrees with its target under that and other readings.

Published heads of one form differ in conventions that no error betrays (which hidden states, which norms, whose rotary
embedding); a wrong one costs acceptance only. The doctor tries the alternatives on text that the target writes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..features import watch_features
from .configuration_eagle import EagleConfig
from .formats import Checkpoint, HubOptions, read_head
from .modeling_eagle import EagleHead


PROMPTS = (
    "Explain to a child why the sky is blue during the day and red in the evening.",
    "Write a Python function that returns the longest word of a sentence, with a docstring and two examples.",
    "My flight leaves at 6:40 and the train to the airport takes 50 minutes. When should I get up?",
    "List the steps to repot a house plant.",
    "What is the difference between a virus and a bacterium?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Summarize the rules of chess for somebody who has never played.",
    "def quicksort(values):",
)
"""What the target answers if the user gives no text: chat and code."""

CLEARLY_BETTER = 1.05
"""An alternative is recommended from this ratio of acceptance lengths on; noise on a few hundred tokens is below."""
WEAK = 1.25
"""A chain's acceptance length below which a head is not worth its time."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """
    How a head does under one reading.

    Args:
        name (`str`): the reading.
        changes (`dict`): the fields of `EagleConfig` to set for it, those of its `text_config` as `text_config.…`.
        boundaries (`list[int]`): the target's hidden states it reads.
        top1 (`list[float]`): for every depth, how often the head's best token is the target's, along its own text.
        acceptance_length (`float`): tokens per step of a greedy chain as deep, the bonus included, if it started
            behind every token of the text.
    """

    name: str
    changes: dict[str, Any]
    boundaries: list[int]
    top1: list[float]
    acceptance_length: float


@dataclass(eq=False)
class Diagnosis:
    """
    What the doctor found.

    Args:
        head (`str`), target (`str`): their names.
        format (`str`): the published format.
        config (`EagleConfig`): the head, as read.
        conventions (`dict[str, str]`): what was assumed, and why.
        keys (`dict[str, list[str]]`): "used" and "ignored" keys of the checkpoint.
        agreements (`list[Agreement]`): as read, then every alternative that was tried.
        num_tokens (`int`): tokens of the text.
        tree_acceptance_length (`float`, *optional*): tokens per step of real generation with the head's default tree,
            under the best reading.
        problem (`str`, *optional*): why the head cannot draft for the target at all.
    """

    head: str
    target: str
    format: str
    config: EagleConfig
    conventions: dict[str, str]
    keys: dict[str, list[str]] = field(repr=False)
    agreements: list[Agreement] = field(default_factory=list)
    num_tokens: int = 0
    tree_acceptance_length: float | None = None
    problem: str | None = None

    @property
    def as_read(self) -> Agreement:
        return self.agreements[0]

    @property
    def best(self) -> Agreement:
        """The reading to use: as read, unless an alternative is clearly better."""
        best = max(self.agreements, key=lambda agreement: agreement.acceptance_length)
        # The gain over plain decoding counts: the bonus token is everybody's.
        is_clear = best.acceptance_length - 1 > (self.as_read.acceptance_length - 1) * CLEARLY_BETTER + 0.02
        return best if is_clear and best.acceptance_length >= WEAK else self.as_read

    @property
    def is_good(self) -> bool:
        """Whether the head can be used as it is."""
        return self.problem is None and self.best is self.as_read and self.best.acceptance_length >= WEAK

    @property
    def verdict(self) -> str:
        """One sentence, and the fix."""
        if self.problem is not None:
            return f"The head does not fit the target. {self.problem}"
        best = self.best
        if best is not self.as_read:
            return (
                f"The head is misread: {best.name} raises the acceptance length from "
                f"{self.as_read.acceptance_length:.2f} to {best.acceptance_length:.2f}. Load it with {self.fix}."
            )
        if best.acceptance_length < WEAK:
            return (
                f"The head agrees too little with this target ({best.acceptance_length:.2f} tokens a step), and no "
                "other reading helps: it was trained for another target or other text, or too briefly. Check "
                f"`target_name` ({self.config.target_name or 'not given'}), or train one with `hf-specdec train`."
            )
        return f"The head fits as it is read: {best.acceptance_length:.2f} tokens a step in a chain."

    @property
    def fix(self) -> str:
        """How to load the head under the best reading, as code."""
        plain = {name: value for name, value in self.best.changes.items() if not name.startswith("text_config.")}
        nested = [name for name in self.best.changes if name.startswith("text_config.")]
        arguments = "".join(f", {name}={value!r}" for name, value in plain.items())
        call = f"`EagleHead.from_pretrained({self.head!r}{arguments})`"
        for name in nested:
            call += f" and `{name}` = {self.best.changes[name]!r} in config.json"
        return call


@torch.no_grad()
def diagnose(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    head: str,
    *,
    options: HubOptions | None = None,
    prompts: tuple[str, ...] = PROMPTS,
    max_new_tokens: int = 96,
    depth: int = 5,
    **changes: Any,
) -> Diagnosis:
    """
    Examines a head.

    Args:
        target (`PreTrainedModel`): the model it is to draft for.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        head (`str`): folder or Hub repository of the head.
        options (`HubOptions`, *optional*): where to look for it.
        prompts (`tuple[str, …]`, *optional*): what the target answers, greedily; through its chat template if it has
            one.
        max_new_tokens (`int`, *optional*, defaults to 96): tokens of each answer.
        depth (`int`, *optional*, defaults to 5): depths to look at.
        changes: fields of `EagleConfig` to read otherwise, as of `EagleHead.from_pretrained`.

    Raises:
        OSError, ValueError: as `EagleHead.from_pretrained`, if the checkpoint cannot be read.
    """
    options = options or HubOptions()
    checkpoint = Checkpoint.read(head, options)
    reading = read_head(checkpoint)
    model = EagleHead.from_pretrained(head, **options.as_arguments(), **changes)
    diagnosis = Diagnosis(
        head=head,
        target=target.name_or_path,
        format=model.config.source_format or "hf_specdec",
        config=model.config,
        conventions=dict(model.config.conventions or {}),
        keys={"used": sorted(reading.weights), "ignored": sorted(reading.ignored)},
    )
    from ..drafters import EagleDrafter  # which imports this package

    drafter = EagleDrafter(model)
    try:
        drafter.check(target, drafter.default_tree)
    except ValueError as error:
        diagnosis.problem = str(error)
        return diagnosis
    model = model.to(device=target.device, dtype=target.dtype).eval()
    texts = _answers(target, tokenizer, prompts, max_new_tokens)
    diagnosis.num_tokens = sum(len(ids) - prompt for ids, prompt in texts)
    for name, config_changes in _readings(model.config, target):
        diagnosis.agreements.append(_measure(name, config_changes, model, target, texts, depth))
    diagnosis.tree_acceptance_length = _generate(diagnosis.best, model, target, texts, max_new_tokens)
    return diagnosis


def _answers(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: tuple[str, ...], max_new_tokens: int
) -> list[tuple[torch.Tensor, int]]:
    """For every prompt its tokens and the target's greedy answer, `[tokens]`, and how many are the prompt's."""
    texts = []
    for prompt in prompts:
        if tokenizer.chat_template is None:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            messages = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        ids = ids.to(target.device)
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **_GREEDY
        )
        texts.append((text[0], ids.shape[1]))
    return texts


_GREEDY = {"temperature": None, "top_p": None, "top_k": None}  # some models' own defaults, which greedy calls warn of


def _readings(config: EagleConfig, target: PreTrainedModel) -> list[tuple[str, dict[str, Any]]]:
    """What to try: the head as read first, then one change at a time."""
    readings: list[tuple[str, dict[str, Any]]] = [("as read", {})]
    target_config = target.config.get_text_config(decoder=True)
    if config.num_aux_features:
        number = target_config.num_hidden_layers
        boundaries = config.aux_boundaries(number)
        names = {1: "layer ids + 1 (outputs)", -1: "layer ids - 1"}
        for step, name in names.items():
            shifted = [layer + step for layer in boundaries]
            if min(shifted) >= 0 and max(shifted) <= number:
                readings.append((name, {"aux_layer_ids": shifted}))
    if config.eagle_version == 3:
        for flag in ("norm_before_residual", "norm_output", "norm_hidden_twice"):
            if flag == "norm_hidden_twice" and not config.norm_embeddings:
                continue  # there is no norm to pass twice
            value = not getattr(config, flag)
            readings.append((f"{flag}={value}", {flag: value}))
    theta = (config.text_config.rope_parameters or {}).get("rope_theta")
    its_theta = (getattr(target_config, "rope_parameters", None) or {}).get("rope_theta")
    if its_theta is not None and its_theta != theta:
        readings.append(("the target's rope_theta", {"text_config.rope_theta": its_theta}))
    return readings


def _changed(head: EagleHead, changes: dict[str, Any]) -> EagleHead:
    """The same weights under another reading."""
    if not changes:
        return head
    config = copy.deepcopy(head.config)
    for name, value in changes.items():
        if name == "text_config.rope_theta":
            config.text_config.rope_parameters = {**config.text_config.rope_parameters, "rope_theta": value}
        else:
            setattr(config, name, value)
            if name == "aux_layer_ids":
                config.aux_layer_convention = "boundaries"
    changed = EagleHead(config).to(device=head.device, dtype=head.dtype).eval()
    changed.load_state_dict(head.state_dict())
    return changed


def _measure(
    name: str,
    changes: dict[str, Any],
    head: EagleHead,
    target: PreTrainedModel,
    texts: list[tuple[torch.Tensor, int]],
    depth: int,
) -> Agreement:
    from ..training.unroll import unroll  # which imports this package

    head = _changed(head, changes)
    boundaries = head.config.aux_boundaries(target.config.get_text_config(decoder=True).num_hidden_layers)
    embedding = head.embed_tokens or target.get_input_embeddings()
    lm_head = head.lm_head or target.get_output_embeddings()
    target_ids = head.target_ids
    hits = []
    for ids, prompt in texts:
        rows = range(prompt - 1, len(ids) - 1 - depth)  # those whose next token the target wrote
        if not rows:
            continue
        with watch_features(target, boundaries) as features:
            target(ids[None], use_cache=False, logits_to_keep=1)
        states = unroll(head, features.take(head.device, head.dtype), embedding(ids[None]).to(head.dtype), depth)
        correct = []
        for step, state in enumerate(states):
            best = lm_head(state[0, rows.start : rows.stop]).argmax(dim=-1)
            best = best if target_ids is None else target_ids[best]
            correct.append(best == ids[rows.start + 2 + step : rows.stop + 2 + step])
        hits.append(torch.stack(correct, dim=1))
    if not hits:
        raise ValueError(f"`max_new_tokens`: the answers are too short to look at {depth} depths. Ask for more.")
    hit = torch.cat(hits).double()
    return Agreement(
        name=name,
        changes=changes,
        boundaries=boundaries,
        top1=hit.mean(dim=0).tolist(),
        acceptance_length=float(1 + hit.cumprod(dim=1).sum(dim=1).mean()),
    )


def _generate(
    agreement: Agreement,
    head: EagleHead,
    target: PreTrainedModel,
    texts: list[tuple[torch.Tensor, int]],
    max_new_tokens: int,
) -> float:
    """Tokens per step of real greedy generation."""
    from ..metrics import last_metrics

    head, tokens, steps = _changed(head, agreement.changes), 0, 0
    for ids, prompt in texts:
        ids = ids[None, :prompt]
        mask = torch.ones_like(ids)
        options = {"do_sample": False, "max_new_tokens": max_new_tokens, **_GREEDY}
        target.generate(ids, attention_mask=mask, assistant_model=head, **options)
        metrics = last_metrics()
        tokens += metrics.num_accepted_tokens + metrics.num_drafts
        steps += metrics.num_drafts
    return tokens / max(steps, 1)
