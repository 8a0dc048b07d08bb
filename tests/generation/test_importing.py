"""`import hf_specdec`: soon done, and with torch and transformers alone."""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_specdec


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
TRIES = 3

GENERATES = """
import sys
for name in {blocked}:
    sys.modules[name] = None  # importing it is an ImportError

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
"""

TIMES = """
import time
{before}
start = time.process_time()
import hf_specdec
print(time.process_time() - start)
"""
HEAD = Path(__file__).parents[2] / "model_cards" / "SmolLM2-135M-Instruct-EAGLE3"


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def extras() -> set[str]:
    """What the extras install, by the names that Python imports."""
    listed = itertools.chain(*PROJECT["optional-dependencies"].values())
    return {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in listed} - {"hf_specdec"}


def test_no_extra_is_needed() -> None:
    """Nor to generate."""
    blocked = extras()
    assert {"triton", "gradio", "accelerate", "typer", "matplotlib", "datasets", "peft"} <= blocked
    run(GENERATES.format(blocked=sorted(blocked)))


@pytest.mark.parametrize(
    "before",
    [
        "import transformers",
        pytest.param("from transformers import AutoModelForCausalLM, LlamaForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_import_takes_less_than_half_a_second(before: str) -> None:
    """Processor time, the median of a few processes."""
    assert statistics.median(float(run(TIMES.format(before=before))) for _ in range(TRIES)) < 0.5


def test_nothing_is_loaded_before_it_is_needed() -> None:
    modules = ("torch", "hf_specdec.generation.loop")
    print_loaded = f"import sys, hf_specdec; print([name for name in {modules} if name in sys.modules])"
    assert run(print_loaded).strip() == "[]"


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("from transformers import AutoConfig", marks=pytest.mark.slow),
        pytest.param("from transformers import AutoModel", marks=pytest.mark.slow),
        "from transformers import AutoModelForCausalLM",
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
    """Whatever is loaded first, calls are ours, and transformers knows our formats."""
    imports = ["import hf_specdec", first]
    if "pipeline" in first or "modeling_llama" in first:
        imports.reverse()
    program = f"""
from transformers import AutoConfig, AutoModel, GenerationConfig, GenerationMixin
assert AutoConfig.from_pretrained({str(HEAD)!r}).model_type == "hf_specdec_eagle"
assert type(AutoModel.from_pretrained({str(HEAD)!r})) is hf_specdec.EagleHead
assert GenerationConfig().tree is None
assert hasattr(GenerationMixin._assisted_decoding, "__wrapped__")
"""
    run("\n".join(imports) + program)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["eagle", "cards", "drafters", "medusa"])
def test_any_part_first(home: str) -> None:
    names = ", ".join(hf_specdec._HOMES[home])
    run(f"from hf_specdec.{home} import {names}\nfrom hf_specdec import {names}")


def test_submodules_need_no_import_of_their_own() -> None:
    """Also in a process that has imported nothing else; other names stay errors."""
    run(
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
