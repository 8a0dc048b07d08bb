"""`OnlineHead`: an EAGLE-3 head that follows a policy while this is trained."""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafters import EagleDrafter
from ..eagle import EagleHead
from ..models.structure import execution_device
from ..ranks import Ranks
from ..training.data import Text
from ..training.packing import Collator, cut, make_row
from ..training.reading import TargetReader
from ..training.ttt import TttObjective
from ..trees import TokenTree
from ..whole_texts import check_trainable
from .policy import base_of, writing
from .vocabulary import VocabularyInUse, end_tokens_of, forget, give_places


logger = logging.get_logger(__name__)

STATE_FILE = "online_head.pt"
"""File beside a saved head with what it needs to learn on."""


class OnlineHead(EagleDrafter):
    """
    A draft that learns: an EAGLE-3 head, trained on the texts that a policy has just written, by the loss of
    `hf-specdec train`. In a context of `hf_specdec.rollouts` it learns after every call, from the latest texts;
    elsewhere it drafts, and learns when `learn` is called. Its weights change between calls alone, in place: texts are
    distributed as without a draft, and captured CUDA graphs stay.

    The policy reads the texts of a learning step once more, with its present weights: the features of the steps that
    wrote them are overwritten on the device, and prompts that share K/V have none.

    Args:
        head (`EagleHead`): the head to begin with, which is copied, in float32: the one given stays as it is.
        lr (`float`): learning rate of AdamW.
        budget (`float`, *optional*): most seconds of learning for a second of all else: of calls, and of the trainer's
            own steps between them. With None every call has `most_steps`, and a seed reproduces runs.
        most_steps (`int`): most optimizer steps after a call.
        texts_per_step (`int`): texts of an optimizer step, drawn from those that are kept.
        most_texts (`int`): how many of the latest texts are kept.
        max_length (`int`): tokens of a text, its prompt included, that are learnt from; the rest is cut off.
        unroll_steps (`int`), decay (`float`): levels of drafting that are unrolled, and the weight of a level relative
            to the one before; see `TttObjective`.
        follow_vocabulary (`bool`): whether tokens that the policy writes, and the head cannot propose, take the places
            of such as it does not write: for a head with a draft vocabulary and an lm_head of its own.
        seed (`int`): seed of the choice of texts, which leaves torch's own generators alone.

    Raises:
        TypeError: for anything but an EAGLE head.
        ValueError: for a head of another version, one that cannot be trained over texts, or an option out of range.
    """

    runs_in_graphs = True
    head: EagleHead

    def __init__(
        self,
        head: EagleHead,
        *,
        lr: float = 1e-4,
        budget: float | None = 0.05,
        most_steps: int = 4,
        texts_per_step: int = 16,
        most_texts: int = 64,
        max_length: int = 512,
        unroll_steps: int = 4,
        decay: float = 0.8,
        follow_vocabulary: bool = True,
        seed: int = 0,
    ):
        _check(head, lr, budget)
        _check_numbers(most_steps=most_steps, texts_per_step=texts_per_step, most_texts=most_texts)
        _check_numbers(max_length=max_length, unroll_steps=unroll_steps)
        own = copy.deepcopy(head).float().eval()
        own.follows_target_dtype = True
        super().__init__(own)
        self.budget, self.most_steps, self.texts_per_step = budget, most_steps, texts_per_step
        self.max_length = max_length
        self.num_steps = 0
        """Optimizer steps so far."""
        self.num_exchanged = 0
        """Places of the draft vocabulary that have got another token so far."""
        self.losses: list[float] = []
        """The loss of every optimizer step since the head was made."""
        self.seconds_learning = self.seconds_between = 0.0
        """Seconds of learning, but for the very first step, and of all else."""
        self._objective = TttObjective(own, unroll_steps, decay)
        self._trained = [weight for name, weight in own.named_parameters() if not name.startswith("embed_tokens.")]
        self.optimizer = torch.optim.AdamW(self._trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._texts: deque[Text] = deque(maxlen=most_texts)
        self._in_use = None
        if follow_vocabulary and own.d2t is not None and own.lm_head is not None:
            self._in_use = VocabularyInUse(own.config.vocab_size)
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._since: float | None = None

    def for_call(self, target: PreTrainedModel) -> Self:
        if self._since is None:
            self._since = time.perf_counter()
        if self.head.device != (device := execution_device(target)):
            with torch.inference_mode(False):  # trainers generate in it, and what is moved there cannot learn
                self.head.to(device)
                _move(self.optimizer, device)
        return super().for_call(target)

    # -------------------------------------------------------------------------------------------------------- learning

    def learn(self, target: Any, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
        """
        Takes texts up and makes as many optimizer steps as the budget has room for. The policy reads them as it wrote
        them, in evaluation mode, and gets no gradients.

        Args:
            target (`PreTrainedModel`): the policy that has written the texts.
            texts (iterable of pairs of lists of `int`): prompts and what follows them.

        Returns:
            `int`: the number of optimizer steps.
        """
        target = base_of(target)
        self.check(target, TokenTree.chain(1))
        ranks, start, texts = Ranks.of(target), time.perf_counter(), list(texts)
        for prompt, written in texts:
            tokens = [*prompt, *written]
            self._texts.extend(cut(Text(tokens, [(len(prompt), len(tokens))]), self.max_length)[:1])
        if self._in_use is not None:
            self._in_use.count(list(written) for _, written in texts)
        self.seconds_between += start - (start if self._since is None else self._since)
        steps = 0
        with writing(target), torch.inference_mode(False):
            while self._texts and steps < self.most_steps and ranks.least(int(self._has_time(steps))):
                begun = time.perf_counter()
                if steps == 0:
                    self._follow_vocabulary(target)
                self.losses.append(self._step(target))
                steps += 1
                if self.num_steps:
                    self.seconds_learning += time.perf_counter() - begun
                self.num_steps += 1
        self._since = time.perf_counter()
        return steps

    def _has_time(self, steps: int) -> bool:
        """Whether the budget has room for a step as long as they have been on average; `steps` ran after this call."""
        if self.budget is None:
            return True
        if self.num_steps < 2:  # the first one loads kernels and tells nothing of the others
            return steps == 0
        expected = self.seconds_learning / (self.num_steps - 1)
        return self.seconds_learning + expected <= self.budget * self.seconds_between

    def _follow_vocabulary(self, target: PreTrainedModel) -> None:
        """Gives tokens that the policy has written lately places in the draft vocabulary."""
        ids, lm_head = self.head.target_ids, self.head.lm_head
        if self._in_use is None or ids is None or lm_head is None:
            return
        places, tokens = self._in_use.exchange(ids.cpu(), always=end_tokens_of(target))
        if len(places) and give_places(self.head, target, places, tokens):
            forget(self.optimizer, lm_head.weight, places)
            self.num_exchanged += len(places)

    def _step(self, target: PreTrainedModel) -> float:
        """One optimizer step on texts drawn from those that are kept; returns its loss."""
        head, device = self.head, self.head.device
        order = torch.randperm(len(self._texts), generator=self._generator, device="cpu")
        chosen = order[: self.texts_per_step].tolist()
        batch = Collator(0)([make_row([self._texts[index]]) for index in chosen])
        batch = {name: values.to(device) for name, values in batch.items()}
        boundaries = head.config.aux_boundaries(target.config.get_text_config(decoder=True).num_hidden_layers)
        outputs = TargetReader(target, boundaries, head.target_ids)(batch["input_ids"].to(target.device))
        moved = {name: getattr(outputs, name).to(device) for name in ("features", "embeddings", "logits", "best")}
        if head.embed_tokens is not None:
            moved["embeddings"] = head.embed_tokens(batch["input_ids"]).detach()
        moved |= {name: moved[name].to(head.dtype) for name in ("features", "embeddings")}
        half = target.dtype if target.dtype == torch.bfloat16 else None
        with torch.enable_grad(), torch.autocast(device.type, half, enabled=half is not None):
            loss = self._objective(replace(outputs, **moved), **batch)["loss"]
            loss.backward(inputs=self._trained)  # nothing of it reaches the policy's own gradients
        norm = torch.nn.utils.clip_grad_norm_(self._trained, 0.5)
        found = loss.item()
        if math.isfinite(found) and bool(norm.isfinite()):
            self.optimizer.step()
        else:
            logger.warning("`OnlineHead`: a step whose loss or gradients are not finite is left out.")
        self.optimizer.zero_grad(set_to_none=True)
        return found

    # --------------------------------------------------------------------------------------------- saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on as if there had been no end: weights, optimizer, texts, counts."""
        return {"head": self.head.state_dict(), **self._state()}

    def _state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "texts": [(list(text.input_ids), list(text.spans)) for text in self._texts],
            "generator": self._generator.get_state(),
            "num_steps": self.num_steps,
            "num_exchanged": self.num_exchanged,
            "seconds": [self.seconds_learning, self.seconds_between],
            "in_use": None if self._in_use is None else self._in_use.counts.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Takes over what `state_dict` has returned; weights are written in place.

        Raises:
            ValueError: for the state of a head of other shapes.
        """
        own = self.head.state_dict()
        for name in own.keys() | state["head"].keys():
            shapes = [tuple(one[name].shape) if name in one else None for one in (own, state["head"])]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"`state`: `{name}` has the shape {shapes[1]}, and in this head {shapes[0]}. Make the "
                    "`OnlineHead` of the head that it was saved with."
                )
        self.head.load_state_dict(state["head"])
        self._take(state)

    def _take(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._texts.clear()
        self._texts.extend(Text(ids, [tuple(span) for span in spans]) for ids, spans in state["texts"])
        self._generator.set_state(state["generator"])
        self.num_steps, self.num_exchanged = state["num_steps"], state.get("num_exchanged", 0)
        self.seconds_learning, self.seconds_between = state["seconds"]
        if self._in_use is not None and (counts := state.get("in_use")) is not None:
            self._in_use.counts.copy_(counts)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Saves the head as every head is saved, for any use, and beside it what it needs to learn on."""
        self.head.save_pretrained(folder)
        torch.save(self._state(), Path(folder) / STATE_FILE)

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], **options: Any) -> OnlineHead:
        """
        Goes on with a head that `save_pretrained` has saved, or begins with any other one.

        Args:
            name (`str` or path): folder or Hub id of an EAGLE-3 head.
            options: those of the class.

        Raises:
            OSError, ValueError: as `EagleHead.from_pretrained`.
        """
        made = cls(EagleHead.from_pretrained(name), **options)
        file = Path(name) / STATE_FILE
        if file.is_file():
            made._take(torch.load(file, map_location="cpu", weights_only=True))
        return made


def _move(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves an optimizer's state to the device of its weights."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                state[name] = value.to(device)


def _check(head: Any, lr: Any, budget: Any) -> None:
    if not isinstance(head, EagleHead):
        raise TypeError(
            f"`head` must be an EagleHead, but is {type(head).__name__}. Load one: `EagleHead.from_pretrained(…)`."
        )
    if head.config.eagle_version != 3:
        raise ValueError(
            f"`head` is of EAGLE version {head.config.eagle_version}: an `OnlineHead` is of version 3. Pass the head "
            "itself, which does not learn."
        )
    check_trainable(head)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < math.inf:
        raise ValueError(f"`lr` must be a positive number, but is {lr!r}.")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 0):
        raise ValueError(f"`budget` must be a share of the time, 0.05 for 5 %, or None for any, but is {budget!r}.")


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be an integer of 1 or more, but is {value!r}.")
