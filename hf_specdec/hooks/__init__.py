"""
Hooks that let hf_specdec serve `model.generate(assistant_model=…, tree=…)` and `generate_batch`, on unchanged
transformers. The speculative code is imported with the first speculative call.

    importing.py   actions that wait until a module of transformers is imported
    calls.py       which calls are ours
    options.py     `tree=` and `speculative_config=` in `GenerationConfig`, our configs with `AutoConfig`
    generate.py    wrapped methods of `generate`
    batches.py     wrapped methods of `generate_batch` and of managers
    models.py      models with a `generate` of their own
    pipelines.py   pipelines with a draft
"""

from __future__ import annotations

from .importing import when_imported
from .options import add_options, register_configs
from .pipelines import let_pipelines_take_drafts


def install_when_needed() -> None:
    """Installs the hooks when transformers' modules are imported: at once for modules that already are."""
    when_imported("transformers.generation.configuration_utils", add_options)
    when_imported("transformers.generation.utils", install)
    when_imported("transformers.models.auto.configuration_auto", register_configs)
    when_imported("transformers.pipelines.base", let_pipelines_take_drafts)


def install() -> None:
    """
    Wraps methods of `GenerationMixin` and `ContinuousMixin`, once. The wrappers serve speculative calls and pass all
    other calls to the original methods.
    """
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
    from transformers.generation.utils import GenerationMixin

    from .batches import wrap_batches
    from .generate import wrap_generate
    from .models import wrap_when_imported

    add_options()
    if hasattr(GenerationMixin._assisted_decoding, "__wrapped__"):
        return
    wrap_generate(GenerationMixin)
    wrap_batches(ContinuousMixin)
    wrap_when_imported()
