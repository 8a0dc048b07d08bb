"""`import hf_specdec`: soon done, and with torch and transformers alone."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.blocks import block_head
from support.eagle import head_of
from support.fresh import run_python
from support.heads import trained_medusa_heads

import hf_specdec
from hf_specdec import MtpConfig


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
TRIES = 3

BLOCKED = """
import sys
for name in {blocked}:
    sys.modules[name] = None  # importing it is an ImportError
"""
GENERATES = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_specdec, hf_specdec_kernels

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=None
)
model = LlamaForCausalLM(config).double().eval()
prompt = torch.tensor([[3, 4, 5, 3, 4, 5]])
call = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
plain = model.generate(prompt, **call)
for draft in (model, hf_specdec.NgramDraft(min_ngram=1)):
    assert model.generate(prompt, assistant_model=draft, tree="[(0,), (1,), (0, 0)]", **call).equal(plain)
    assert hf_specdec.last_metrics().num_drafts > 0
assert not torch.cuda.is_initialized()
assert "hf_specdec.cli" not in sys.modules
"""

TIMES = """
import time
{before}
start = time.process_time()
import hf_specdec
print(time.process_time() - start)
"""
HEAD = Path(__file__).parents[2] / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"
IS_HOOKED = f"""
from transformers import AutoConfig, AutoModel, GenerationConfig, GenerationMixin
assert AutoConfig.from_pretrained({str(HEAD)!r}).model_type == "hf_specdec_eagle"
assert type(AutoModel.from_pretrained({str(HEAD)!r})) is hf_specdec.EagleHead
assert GenerationConfig().tree is None
assert hasattr(GenerationMixin._assisted_decoding, "__wrapped__")
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def extras() -> set[str]:
    """What the extras install, by the names that Python imports."""
    listed = itertools.chain(*PROJECT["optional-dependencies"].values())
    return {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in listed} - {"hf_specdec"}


@pytest.mark.slow
def test_no_extra_is_needed() -> None:
    """
    Nor what the command line is made of, nor CUDA: without them, and imported before all else, the library's calls are
    ours, transformers knows our formats, and `generate` speculates.
    """
    blocked = extras() | {"click"}
    assert {"triton", "gradio", "gguf", "accelerate", "typer", "rich", "scipy", "matplotlib", "datasets"} <= blocked
    first = "import hf_specdec\nfrom transformers import AutoModelForCausalLM\n"
    run(BLOCKED.format(blocked=sorted(blocked)) + first + IS_HOOKED + GENERATES)


@pytest.mark.parametrize(
    "before",
    [
        "import transformers",
        pytest.param("from transformers import AutoModelForCausalLM, LlamaForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_import_takes_less_than_half_a_second(before: str) -> None:
    """Processor time, in one of a few processes."""
    assert any(float(run(TIMES.format(before=before))) < 0.5 for _ in range(TRIES))


def test_nothing_is_loaded_before_it_is_needed() -> None:
    modules = ("torch", "hf_specdec.generation.loop")
    print_loaded = f"import sys, hf_specdec; print([name for name in {modules} if name in sys.modules])"
    assert run(print_loaded).strip() == "[]"


def test_auto_classes_know_heads_of_every_kind(tmp_path: Path) -> None:
    """In a process that has imported `hf_specdec` alone. MTP modules belong to a target: the message says so."""
    heads = {"block": block_head("dspark"), "eagle": head_of("speculators_eagle3"), "medusa": trained_medusa_heads()}
    for name, head in heads.items():
        head.save_pretrained(tmp_path / name)
    MtpConfig(text_config=heads["eagle"].config.text_config, num_modules=2).save_pretrained(tmp_path / "mtp")
    printed = run_python(f"""
        import hf_specdec
        from transformers import AutoConfig, AutoModel

        for name in ("block", "eagle", "medusa", "mtp"):
            folder = {str(tmp_path)!r} + "/" + name
            assert AutoConfig.from_pretrained(folder).model_type == "hf_specdec_" + name
            try:
                print(type(AutoModel.from_pretrained(folder)).__name__)
            except ValueError as error:
                print(error)
    """)
    *classes, refusal = printed.splitlines()
    assert classes == [type(head).__name__ for head in heads.values()]
    assert "MtpHead.from_target(model)" in refusal


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("from transformers import AutoConfig", marks=pytest.mark.slow),
        pytest.param("from transformers import AutoModel", marks=pytest.mark.slow),
        pytest.param("from transformers.models.llama.modeling_llama import LlamaForCausalLM", marks=pytest.mark.slow),
        pytest.param("from transformers.models.llama.configuration_llama import LlamaConfig", marks=pytest.mark.slow),
        pytest.param("from transformers import GenerationConfig, pipeline", marks=pytest.mark.slow),
        pytest.param("import transformers.generation.utils", marks=pytest.mark.slow),
        pytest.param(
            "import importlib.util; importlib.util.find_spec('transformers.generation.utils')", marks=pytest.mark.slow
        ),
    ],
)
def test_any_order_of_imports(first: str) -> None:
    """
    Whatever is loaded first, calls are ours, and transformers knows our formats. (`import hf_specdec` before all of
    transformers: `test_no_extra_is_needed`.)
    """
    imports = ["import hf_specdec", first]
    if "pipeline" in first or "modeling_llama" in first:
        imports.reverse()
    run("\n".join(imports) + IS_HOOKED)


def test_all_of_transformers_first() -> None:
    run_python("import hf_specdec\n" + IS_HOOKED)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["eagle", "cards", "drafters", "medusa"])
def test_any_part_first(home: str) -> None:
    names = ", ".join(hf_specdec._HOMES[home])
    run_python(f"from hf_specdec.{home} import {names}\nfrom hf_specdec import {names}")


def test_submodules_need_no_import_of_their_own() -> None:
    """Also in a process that has imported nothing else of the library; other names stay errors."""
    run_python(
        "import hf_specdec\n"
        "assert callable(hf_specdec.smollm2.smollm2_folder)\n"
        "assert callable(hf_specdec.doctor.diagnose)\n"
        "assert not hasattr(hf_specdec, 'nothing') and not hasattr(hf_specdec, '_private')\n"
    )


def test_public_names() -> None:
    """All public names are there, and no others."""
    assert set(hf_specdec.__all__) == set(hf_specdec._HOME) <= set(dir(hf_specdec))
    for name in hf_specdec.__all__:
        assert getattr(hf_specdec, name).__module__.startswith("hf_specdec.")
    with pytest.raises(AttributeError, match="no attribute 'Trees'"):
        hf_specdec.Trees  # noqa: B018
