"""What importing hf_specdec does to transformers, and above all what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import TREE, generate_plain
from support.fresh import run_python
from support.models import noisy_copy, prompts, tiny_model
from transformers import GenerationConfig, PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig, TokenTree, last_metrics
from hf_specdec.hooks.calls import MODULES_OF_DRAFTS
from hf_specdec.metrics import set_last_metrics


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 10},
    "beams": {"num_beams": 3},
    "penalised": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "assisted": {"assistant_model": True},
    "assisted, sampled": {"assistant_model": True, "do_sample": True, "temperature": 0.7},
    "assisted, with scores": {"assistant_model": True, "return_dict_in_generate": True, "output_scores": True},
    "prompt look-up": {"prompt_lookup_num_tokens": 3},
    "prompt look-up, sampled": {"prompt_lookup_num_tokens": 3, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
}


def results() -> dict[str, Any]:
    """What these calls give, transformers' own assisted generation among them."""
    target = tiny_model()
    out: dict[str, Any] = {}
    for name, call in CALLS.items():
        options = {"max_new_tokens": 16, "do_sample": False} | call
        if "assistant_model" in call:
            options["assistant_model"] = noisy_copy(target)
        torch.manual_seed(0)
        given = target.generate(**prompts(1, 12), **options)
        if isinstance(given, torch.Tensor):
            out[name] = given.tolist()
        else:
            out[name] = [given.sequences.tolist(), sorted(given.keys()), [float(s.amax()) for s in given.scores]]
        out[name + ", random state"] = int(torch.randint(10**9, ()))
    return out


def test_without_a_tree_generate_is_transformers_own() -> None:
    """The same results as in an interpreter that never imported hf_specdec, and the same random state afterwards."""
    untouched = run_python(
        f"""
        import importlib.util, json, sys
        import torch
        source = open({str(Path(__file__))!r}).read()
        # The two definitions above, without this file's imports of hf_specdec.
        from typing import Any
        from support.models import noisy_copy, prompts, tiny_model
        start, end = source.index("CALLS: dict"), source.index("def test_without_a_tree")
        exec(compile("from __future__ import annotations\\n" + source[start:end], "results", "exec"))
        given = results()
        assert "hf_specdec" not in sys.modules
        print(json.dumps(given))
        """
    )
    before = last_metrics()
    assert json.loads(json.dumps(results())) == json.loads(untouched.splitlines()[-1])
    assert last_metrics() is before


def test_a_draft_model_alone_is_transformers_own(target: PreTrainedModel) -> None:
    """Only a tree, a config or a drafter of ours makes a call ours."""
    draft = noisy_copy(target)  # transformers adapts the draft's own generation config as it goes
    set_last_metrics(None)
    plain = generate_plain(target, prompts(1, 12), {"max_new_tokens": 16})
    assert generate_plain(target, prompts(1, 12), {"max_new_tokens": 16, "assistant_model": draft}).equal(plain)
    assert last_metrics() is None
    for ours in (
        {"assistant_model": draft, "tree": TREE},
        {"assistant_model": draft, "speculative_config": SpeculativeConfig()},
        {"assistant_model": draft, "speculative_config": {}},
        {"assistant_model": NgramDraft(min_ngram=1)},
    ):
        set_last_metrics(None)
        assert generate_plain(target, prompts(1, 12), {"max_new_tokens": 16, **ours}).equal(plain)
        assert last_metrics() is not None


@pytest.mark.parametrize(
    "tree", [TREE, [(0,), (1,), (0, 0)], TokenTree.chain(3), DynamicTree(depth=3, top_k=2, num_nodes=6)], ids=repr
)
@pytest.mark.some_cases(2)
def test_the_options_travel_in_a_generation_config(
    target: PreTrainedModel, draft: PreTrainedModel, tree: Any, tmp_path: Path
) -> None:
    """By `generation_config=`, and through a saved file."""
    plain = generate_plain(target, prompts(1, 12), {"max_new_tokens": 16})
    for options in ({"tree": tree}, {"speculative_config": SpeculativeConfig(tree=tree)}):
        config = GenerationConfig(max_new_tokens=16, pad_token_id=0, do_sample=False, **options)
        config.save_pretrained(tmp_path)
        for given in (config, GenerationConfig.from_pretrained(tmp_path)):
            set_last_metrics(None)
            text = target.generate(**prompts(1, 12), generation_config=given, assistant_model=draft)
            assert text.equal(plain)
            assert last_metrics().num_accepted_tokens > 0


def test_other_configs_know_nothing_of_trees() -> None:
    """The options are attributes of the class, unset: they appear in no config that does not set them."""
    assert GenerationConfig().tree is None and GenerationConfig().speculative_config is None
    assert "tree" not in GenerationConfig(max_new_tokens=3).to_diff_dict()
    assert "tree" not in json.loads(GenerationConfig(max_new_tokens=3).to_json_string())


def test_importing_again_is_harmless() -> None:
    """A second import, reloads of the package and of its hook: methods are wrapped once, and calls work."""
    printed = run_python(
        """
        import importlib, sys
        from transformers.generation.utils import GenerationMixin
        original = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode
        import hf_specdec
        hooked = GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode
        assert [method.__wrapped__ for method in hooked] == list(original)
        import hf_specdec
        importlib.reload(hf_specdec)
        importlib.reload(hf_specdec.hooks)
        hf_specdec.hooks.install()
        importlib.reload(hf_specdec)
        assert (GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode) == hooked

        from support.models import noisy_copy, prompts, tiny_model
        target = tiny_model()
        options = dict(**prompts(1, 12), max_new_tokens=12, do_sample=False)
        plain = target.generate(**options)
        assert target.generate(**options, assistant_model=noisy_copy(target)).equal(plain)
        imported = {name for name in sys.modules if name.startswith("hf_specdec")}
        assert not imported & {"hf_specdec.attention", "hf_specdec.drafters"}  # nothing that speculates
        assert target.generate(**options, assistant_model=noisy_copy(target), tree="[(0,), (0, 0)]").equal(plain)
        assert target.generate(**options, assistant_model=hf_specdec.NgramDraft(min_ngram=1)).equal(plain)
        print(hf_specdec.last_metrics().num_drafts > 0)
        """
    )
    assert printed.split() == ["True"]


def test_the_public_names_are_there() -> None:
    assert set(hf_specdec.__all__) <= set(dir(hf_specdec))
    assert hf_specdec.__version__.count(".") == 2


def test_every_head_is_known_by_its_module() -> None:
    """A process may have imported nothing but the module of its head when it calls `generate`."""
    public = [getattr(hf_specdec, name) for name in hf_specdec.__all__]
    heads = [one for one in public if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    assert {hf_specdec.BlockHead, hf_specdec.EagleHead, hf_specdec.MedusaHeads, hf_specdec.MtpHead} <= set(heads)
    assert {one.__module__ for one in heads} <= set(MODULES_OF_DRAFTS)
