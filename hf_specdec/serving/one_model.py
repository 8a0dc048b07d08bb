"""The one model that is served, in the place of transformers' model manager."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality, get_response_template

from ..adapters import Choice
from .calls import CallSyntax
from .characters import shortened
from .defaults import NO_IMAGES
from .engine.messages import Served
from .errors import UnknownModel
from .images import ImageReader
from .reasoning import Reasoning, has_reasoning
from .requests import Facts, reserved_names, roles_of, switches_of
from .text_limits import TextLimit
from .tokenising import PromptMaker
from .work_pool import WorkPool


def _calls_of(model: Served, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None) -> CallSyntax | None:
    """The syntax of a model's calls. If another response template than its own reads them, that becomes its own."""
    renderer: Any = tokenizer if images is None else images.processor
    found = CallSyntax.of(partial(renderer.apply_chat_template, tokenize=False), tokenizer, model)
    if found is not None and found.template is not get_response_template(tokenizer, model):
        tokenizer.response_template = found.template
    return found


class OneModel(ModelManager):
    """
    A model manager with a single model, which the engine has already loaded.

    Args:
        name (`str`): the model's name for clients.
        model (`Served`): config and generation config of the model, as the engine reports them.
        tokenizer (`PreTrainedTokenizerBase`): the model's tokenizer.
        images (`ImageReader` or `str`, *optional*): reads images in messages; or the reason why there may be none.
    """

    def __init__(
        self,
        name: str,
        model: Served,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageReader | str = NO_IMAGES,
    ):
        self._loaded, self._began = (model, tokenizer), int(time.time())
        self._images = images if isinstance(images, ImageReader) else None
        self.work = WorkPool()
        """Does the work on large requests."""
        self.calls = _calls_of(model, tokenizer, self._images)
        """How the model calls functions; None if that is not known."""
        template = get_response_template(tokenizer, model)
        self.reasoning = Reasoning.of(template, tokenizer)
        """The marks of the model's reasoning, if it has any."""
        self.facts = Facts(
            model.config.get_text_config().vocab_size,
            roles_of(tokenizer),
            reserved_names(tokenizer),
            has_end=model.generation_config.eos_token_id is not None,
            no_images=images if isinstance(images, str) else "",
            switches=switches_of(tokenizer if self._images is None else self._images.processor),
            reasons=has_reasoning(template) or "<think>" in str(tokenizer.chat_template),  # as R1's own templates
        )
        """What checks of requests have to know."""
        limit = TextLimit.of(tokenizer, model.longest_text)
        self.prompts = PromptMaker(tokenizer, limit, self._images, self.reasoning)
        """Stands for the tokenizer where handlers make prompts."""
        self.answer_seconds: float | None = None
        """Most seconds that an answer may take; None: any number."""
        super().__init__(force_model=name)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, PreTrainedTokenizerBase]:
        return self._loaded

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        return Modality.LLM if self._images is None else Modality.VLM

    async def load_model_streaming(self, name: str = "", *_: Any, **__: Any) -> AsyncIterator[str]:
        yield f"data: {json.dumps({'status': 'ready', 'model': name or self.force_model, 'cached': True})}\n\n"

    def list_models(self, *_: Any) -> list[dict[str, Any]]:
        own = {"id": self.force_model, "object": "model", "created": self._began, "owned_by": "hf-specdec"}
        own |= {"root": self.force_model, "parent": None, "max_model_len": self._loaded[0].longest_text}
        return [own, *(own | {"id": name, "parent": self.force_model} for name in self._loaded[0].adapters)]

    get_gen_models = list_models  # its name before transformers 5.24

    def id_of(self, name: str | None) -> str:
        """
        The id of the model, or of the adapter, that goes by a name: its own, or that with the revision that
        transformers' server adds. None: the model.

        Raises:
            UnknownModel: for any other name.
        """
        known = [one["id"] for one in self.list_models()]
        for found in known:
            if name in (None, found, f"{found}@main"):
                return found
        others = f" (with the adapters {', '.join(map(repr, known[1:]))})" if known[1:] else ""
        raise UnknownModel(f"`model={shortened(name)}` is not served here, but {known[0]!r}{others} is.")

    def adapter_of(self, name: str | None) -> Choice:
        """The adapter of a request for a model of this name."""
        adapters, found = self._loaded[0].adapters, self.id_of(name)
        return (found if found in adapters else None) if adapters else ...
