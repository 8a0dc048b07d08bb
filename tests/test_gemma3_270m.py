"""Real weights with windows of 512 tokens: Gemma 3 270M on the CPU, in float32, greedy; skipped without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import EagleHead, NgramDraft
from hf_specdec.cli import build_app
from hf_specdec.gemma3_270m import gemma3_270m_folder


pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[1] / "docs"
CAPITALS = "The capital of France is Paris. The capital of Italy is Rome. The capital of"


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return gemma3_270m_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def target(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def page(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A prompt of 700 tokens: the page about heads, whose beginning is out of the windows."""
    return tokenizer((DOCS / "heads.md").read_text())["input_ids"][:700]


@pytest.fixture(scope="module")
def continued(target: PreTrainedModel, page: list[int]) -> list[int]:
    """The page and what plain `generate` writes after it."""
    return target.generate(torch.tensor([page]), max_new_tokens=40, do_sample=False)[0].tolist()


def test_ngrams(target: PreTrainedModel, page: list[int], continued: list[int]) -> None:
    options = {"do_sample": False, "assistant_model": NgramDraft()}
    output = target.generate(torch.tensor([page]), max_new_tokens=40, **options)
    assert output[0].tolist() == continued
    assert hf_specdec.last_metrics().num_accepted_tokens > 0


def test_requests_in_flight(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, page: list[int], continued: list[int]
) -> None:
    """A prompt beyond the windows beside a short one."""
    short = tokenizer(CAPITALS)["input_ids"]
    plain = target.generate(torch.tensor([short]), max_new_tokens=40, do_sample=False)[0].tolist()
    outputs = target.generate_batch(
        [page, short], assistant_model=NgramDraft(), max_new_tokens=40, do_sample=False, progress_bar=False
    )
    texts = [output.prompt_ids + output.generated_tokens for output in outputs.values()]
    assert texts == [continued, plain]
    assert " Berlin" in tokenizer.decode(plain)


def test_a_head_of_a_minute(
    target: PreTrainedModel, folder: Path, page: list[int], continued: list[int], tmp_path: Path
) -> None:
    """Trained by the command on the pages of the documentation; it drafts in a tree, beyond the windows."""
    data, output = tmp_path / "pages.jsonl", tmp_path / "head"
    texts = [part for path in sorted(DOCS.glob("*.md")) for part in path.read_text().split("\n## ")]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [
        "train",
        "--output",
        str(output),
        "--target",
        str(folder),
        "--data",
        str(data),
        "--no-progress",
        "--cpu",
    ]
    command += "--max-length 128 --batch-tokens 512 --draft-vocab-size 2048 --unroll-steps 3 --eval-texts 4".split()
    result = CliRunner().invoke(build_app(), [*command, "--max-seconds", "60"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    options = {"do_sample": False, "assistant_model": EagleHead.from_pretrained(output)}
    text = target.generate(torch.tensor([page]), max_new_tokens=40, tree="[(0,), (1,), (0, 0)]", **options)
    assert text[0].tolist() == continued
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
