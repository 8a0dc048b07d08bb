"""`import hf_specdec`: soon done, and with torch and transformers alone."""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path


PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
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

# A program with a model has loaded these in any case, hf_specdec or not.
TIMES = """
import time
from transformers import AutoModelForCausalLM, LlamaForCausalLM
before = time.process_time()
import hf_specdec
print(time.process_time() - before)
"""


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


def test_it_takes_less_than_half_a_second() -> None:
    """Processor time, the median of a few processes: what transformers' own modules take does not count."""
    assert statistics.median(float(run(TIMES)) for _ in range(TRIES)) < 0.5
