"""Real weights with windows of 512 tokens: Gemma 3 270M on the CPU, in float32, greedy; skipped without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import SIGNIFICANCE, Fit, combine, fit
from support.sampling import accept_first_children
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import EagleHead, NgramDraft
from hf_specdec.cli import build_app
from hf_specdec.drafters import other_vocabulary
from hf_specdec.gemma3_270m import gemma3_270m_folder
from hf_specdec.smollm2 import smollm2_folder


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


# -------------------------------------------------------------------------------- as a draft for another vocabulary

ROWS, TOP = 400, 20


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["in shared tokens", "in texts"])
def pair(
    request: pytest.FixtureRequest,
    smollm2: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """Options by which Gemma drafts for SmolLM2."""
    monkeypatch.setattr(other_vocabulary, "_drafters", {})
    if request.param == "in texts":
        monkeypatch.setattr(other_vocabulary, "LEAST_SHARE", 2.0)
    own = AutoTokenizer.from_pretrained(smollm2_folder())
    translation = other_vocabulary.Translation.of(smollm2, target, own, tokenizer)
    assert translation.num_texts == 46_124 and translation.share_of_text == pytest.approx(0.965, abs=1e-3)
    return {"assistant_model": target, "tokenizer": own, "assistant_tokenizer": tokenizer}


def test_greedy_texts_of_another_vocabulary(smollm2: PreTrainedModel, pair: dict[str, Any]) -> None:
    inputs = pair["tokenizer"]("The three primary colours are red,", return_tensors="pt")
    plain = smollm2.generate(**inputs, max_new_tokens=16, do_sample=False)
    for tree in ("chain:3", "[(0,), (1,), (0, 0)]"):
        text = smollm2.generate(**inputs, max_new_tokens=16, do_sample=False, **pair, tree=tree)
        assert text.tolist() == plain.tolist()
        assert hf_specdec.last_metrics().num_accepted_tokens > 0


def fit_of_draws(smollm2: PreTrainedModel, pair: dict[str, Any], tree: str) -> Fit:
    """The first token is the target's own, the second one is drafted: it is fitted after each first one."""
    inputs = pair["tokenizer"]("In the United", return_tensors="pt")
    prompt, many = inputs["input_ids"], {name: ids.expand(ROWS, -1) for name, ids in inputs.items()}
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "top_k": 0, "eos_token_id": None}
    new = smollm2.generate(**many, **options, **pair, tree=tree)[:, prompt.shape[1] :]
    assert hf_specdec.last_metrics().num_accepted_tokens > 50

    def fitted(before: torch.Tensor, tokens: torch.Tensor) -> Fit:
        with torch.no_grad():
            p = smollm2(before).logits[0, -1].double().softmax(dim=-1)
        cells = torch.full(p.shape, TOP)
        cells[p.topk(TOP).indices] = torch.arange(TOP)
        return fit(cells[tokens], torch.zeros(TOP + 1, dtype=p.dtype).scatter_add_(0, cells, p))

    fits = [fitted(prompt, new[:, 0])]
    for first in new[:, :1].unique():
        seconds = new[new[:, 0] == first, 1]
        if len(seconds) >= 60:
            fits.append(fitted(torch.cat([prompt, first.view(1, 1)], dim=1), seconds))
    assert len(fits) > 1
    return combine(fits)


@pytest.mark.parametrize("tree", ["chain:1", "[(0,), (1,)]"])
def test_draws_of_another_vocabulary(smollm2: PreTrainedModel, pair: dict[str, Any], tree: str) -> None:
    found = fit_of_draws(smollm2, pair, tree)
    assert found.p_value > SIGNIFICANCE, found


def test_a_wrong_verifier_of_another_vocabulary_is_found(
    smollm2: PreTrainedModel, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_first_children(monkeypatch)
    assert fit_of_draws(smollm2, pair, "chain:1").p_value < 1e-6
