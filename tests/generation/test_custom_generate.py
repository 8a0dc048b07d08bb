"""`generate(custom_generate=…)`: the repository in hub/, in a process that does not import hf_specdec itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fresh import run_python
from support.goldens import TINY_TARGET, trained_prompts


REPOSITORY = Path(__file__).parents[2] / "hub"
SETTING = f"""
import functools, sys
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, dynamic_module_utils

dynamic_module_utils.HF_MODULES_CACHE = %r  # where copies of remote code go
assert "hf_specdec" not in sys.modules
target, draft = (AutoModelForCausalLM.from_pretrained({str(TINY_TARGET)!r}, dtype=torch.float64) for _ in range(2))
ids = torch.tensor([{trained_prompts()["prompts"][0]}])
options = {{"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}}
plain = target.generate(ids, **options)
ours = options | {{"custom_generate": {str(REPOSITORY)!r}, "trust_remote_code": True}}
"""
CALLS = f"""
def check(text):
    import hf_specdec

    assert torch.equal(text, plain) and hf_specdec.last_metrics().num_drafts > 0
    accepted.append(hf_specdec.last_metrics().num_accepted_tokens)


accepted = []
check(target.generate(input_ids=ids, **ours, assistant_model={str(TINY_TARGET)!r}, tree="chain:3"))
check(target.generate(ids, **ours, assistant_model="ngram"))
check(target.generate(ids, **ours, assistant_model=draft))  # without a tree: its default, and not transformers' own
assert accepted[0] > 8 and accepted[2] > 0

from hf_specdec import SpeculativeConfig

config = GenerationConfig(speculative_config=SpeculativeConfig(tree="chain:1"))
config.eos_token_id = target.generation_config.eos_token_id
check(target.generate(ids, config, **ours, assistant_model=draft))
assert 0 < accepted[3] <= 8

load = functools.partial(target.load_custom_generate, {str(REPOSITORY)!r}, trust_remote_code=True)
target.generate = functools.partial(load(), model=target)  # as in a model that was loaded from such a repository
check(target.generate(ids, **options, assistant_model=draft, tree="chain:2"))
del target.generate

call = {{"assistant_model": draft, "tree": "[(0,), (1,), (0, 0)]", "do_sample": True}}
texts = []
for way in (ours, options):
    torch.manual_seed(0)
    texts.append(target.generate(ids, **(way | call)))
assert torch.equal(*texts)
"""


def test_texts(tmp_path: Path) -> None:
    """Greedy texts are those of plain calls, with every kind of draft; sampled ones those of calls after an import."""
    run_python(SETTING % str(tmp_path) + CALLS)


def test_without_a_draft(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ValueError: `speculative_config`.*pass `assistant_model=`"):
        run_python(SETTING % str(tmp_path) + "target.generate(ids, **ours)")
