"""What README and docs say: their Python runs, their commands parse, and what they name is there."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.compatibility import family_table
from support.exact import SIGNIFICANCE
from support.goldens import trained_prompts, trained_target, trained_tokenizer
from support.models import noisy_copy
from support.pages import PAGES, ROOT, Outcome, blocks, run_blocks, run_pages, runnable
from support.sampling import a_draft, fit_samples, the_target
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli import build_app
from hf_specdec.engine.request import RequestOptions
from hf_specdec.smollm2 import smollm2_folder


RUNNABLE = runnable()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


# -------------------------------------------------------------------------------------------------------------- Python


PROBES = {
    "imports": "```python\nfrom hf_specdec import smollm2\n```\n",
    "alone": "Text.\n\n```python\nimport sys\n\nassert 'hf_specdec' not in sys.modules\nx = 1\n```\n",
    "fails": "```python\nx = 1\n```\n\n```python\nx / 0\n```\n",
}
"""Pages whose outcomes are known, which run with the others."""


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("probes")
    for name, text in PROBES.items():
        (folder / f"{name}.md").write_text(text)
    return {name: folder / f"{name}.md" for name in PROBES}


@pytest.fixture(scope="module")
def outcomes(probes: dict[str, Path], request: pytest.FixtureRequest) -> dict[Path, Outcome]:
    """Those of the pages that this run is to run."""
    own = [item for item in request.session.items if getattr(item, "function", None) is test_python_runs]
    return run_pages([*probes.values(), *(item.callspec.params["page"] for item in own)])


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) for page in RUNNABLE],
    ids=name_of,
)
def test_python_runs(page: Path, outcomes: dict[Path, Outcome]) -> None:
    """
    From top to bottom, in a process that has imported nothing of the library. (`make test-plain` runs those that need
    the package alone.)
    """
    assert outcomes[page].passed, outcomes[page].printed


@pytest.mark.slow
def test_the_tutorial_on_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its Python on real weights, with a head that its command has trained on a few texts."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "model_cards"):
        Path(name).symlink_to(ROOT / name)
    page, folder = ROOT / "docs" / "tutorial.md", smollm2_folder()
    training = next(words[1:] for words in commands(page) if words[:2] == ["hf-specdec", "train"])
    less = "--write-seconds 1 --epochs 1 --eval-texts 1 --unroll-steps 1 --max-length 64".split()
    result = CliRunner().invoke(build_app(), [*training, "--target", str(folder), "--cpu", *less])
    assert result.exit_code == 0, result.output
    here = Path("tutorial.md")
    here.write_text(page.read_text(encoding="utf-8").replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder)))
    names = run_blocks(here, {"__name__": "tutorial"})
    assert names["model"].dtype == torch.float32
    assert names["metrics"].mean_acceptance_length > 2


def test_a_page_runs_alone(probes: dict[str, Path], outcomes: dict[Path, Outcome]) -> None:
    """What one page has imported helps no other; what fails is shown with its line."""
    found = {name: outcomes[page.resolve()] for name, page in probes.items()}
    assert {name: outcome.passed for name, outcome in found.items()} == {
        "imports": True,
        "alone": True,
        "fails": False,
    }
    assert "ZeroDivisionError" in found["fails"].printed and 'fails.md", line 6' in found["fails"].printed


def run_page(page: Path) -> dict[str, Any]:
    """What there is after a page's Python, run in this process."""
    target = trained_target()
    ids = torch.tensor([trained_prompts()["prompts"][0]])
    names = {
        "model": target,
        "draft": noisy_copy(target, noise=0.2),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }
    return run_blocks(page, {"__name__": page.stem, **names})


@cache
def padded_texts() -> tuple[dict[str, Any], torch.Tensor]:
    """A call with padded rows, some of which end early, and what plain `generate` gives."""
    inputs = trained_tokenizer().pad({"input_ids": trained_prompts()["prompts"][:5]}, return_tensors="pt")
    call = {**inputs, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    call["eos_token_id"] = trained_target().generate(**call)[:2, -30].tolist()
    plain = trained_target().generate(**call)
    assert (plain[:, -1] == 0).any() and (plain[:, -1] != 0).any()
    return call, plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tree": "auto"},
        {"tree": "[(0,), (2,), (0, 0), (2, 0)]"},
        {"tree": [(0, "[(0,), (1,)]"), (60, None), (80, "auto")]},
        {"speculative_config": hf_specdec.SpeculativeConfig(disable_by_batch_size=3)},
    ],
    ids=str,
)
@pytest.mark.some_cases(1)
def test_the_drafter_of_phrases_in_batches(options: dict[str, Any]) -> None:
    """`PhraseDraft` of docs/writing-a-drafter.md, with phrases that branch; padded rows, some of which end early."""
    drafter = run_page(ROOT / "docs" / "writing-a-drafter.md")["PhraseDraft"]
    call, plain = padded_texts()
    written = [token for text in plain[:, call["input_ids"].shape[1] :].tolist() for token in text]
    phrases = [written[start : start + size] for start in range(len(written) - 8) for size in (4, 8)]
    phrases += [[*phrase[:3], 5, 6, 7] for phrase in phrases[::3]]
    draft = drafter(phrases)
    output = trained_target().generate(**call, assistant_model=draft, **options)
    assert output.equal(plain)
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert not hasattr(draft, "accepted")


@pytest.mark.parametrize("name", ["PhraseDraft", "OneLayer"])
def test_the_drafters_refuse_what_they_cannot_fill(name: str) -> None:
    namespace = run_page(ROOT / "docs" / "writing-a-drafter.md")
    draft = namespace[name]([[1, 2, 3]] if name == "PhraseDraft" else namespace["layer"])
    dynamic = hf_specdec.DynamicTree(depth=1, top_k=2, num_nodes=2)
    for tree in (dynamic, [(0, "[(0,)]"), (8, dynamic)]):
        with pytest.raises(ValueError, match="`tree`"):
            trained_target().generate(**namespace["inputs"], assistant_model=draft, tree=tree)


@pytest.mark.slow
def test_the_drafter_that_draws_is_exact() -> None:
    """
    Texts drafted by `OneLayer` of docs/writing-a-drafter.md against the enumerated distribution; and those of one that
    says of its best tokens that they were drawn.
    """
    drafter = run_page(ROOT / "docs" / "writing-a-drafter.md")["OneLayer"]
    target = the_target()
    layer = torch.nn.Linear(target.config.hidden_size, target.config.vocab_size, dtype=target.dtype)

    class BestTokens(drafter):
        def propose(self, sequences: Any) -> Any:
            draft = super().propose(sequences)
            return draft and replace(draft, tokens=draft.scores[:, 0].topk(draft.num_nodes).indices)

    for tree in ("[(0,), (1,), (2,)]", "[(0,)]"):
        config = hf_specdec.SpeculativeConfig(tree=tree)
        fit = fit_samples(config, drafter(layer), "top-k")
        assert hf_specdec.last_metrics().num_accepted_tokens > 0
        assert fit.p_value > SIGNIFICANCE, fit
        assert fit_samples(config, BestTokens(layer), "top-k").p_value < SIGNIFICANCE


@pytest.mark.slow
def test_the_verifier_of_chains_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Texts verified by `walk_chain` of docs/writing-a-verifier.md, as its page puts it in a call, against the enumerated
    distribution; and by one that tests p against another q than that of the draws.
    """
    namespace = run_page(ROOT / "docs" / "writing-a-verifier.md")
    walk_chain, kind = namespace["walk_chain"], namespace["OneMore"]
    monkeypatch.setattr(RequestOptions, "verifier", namespace["verifier"])
    config = hf_specdec.SpeculativeConfig(tree="chain:2", verification="rejection")
    fit = fit_samples(config, a_draft("noisy"), "top-k")
    assert hf_specdec.last_metrics().num_accepted_tokens > 0
    assert fit.p_value > SIGNIFICANCE, fit

    def walk_wrongly(self: Any, draft: Any, distribution: Any, rows: list[int], observe: Any = None) -> Any:
        if draft.num_nodes:
            draft = replace(draft, scores=torch.zeros_like(draft.scores))
        return walk_chain(draft, distribution, rows)

    monkeypatch.setattr(kind, "walk", walk_wrongly)
    assert fit_samples(config, a_draft("noisy"), "top-k").p_value < SIGNIFICANCE


@pages
def test_texts_that_are_compared_are_in_float32(page: Path) -> None:
    """`from_pretrained` takes the dtype of the checkpoint, mostly bfloat16, where near-ties go either way."""
    code = "\n".join(code for _, code in blocks(page, "python"))
    if ".equal(" in code:
        loads = re.findall(r"AutoModelForCausalLM\.from_pretrained\(.*\)", code)
        assert [load for load in loads if "float32" not in load] == []


# ------------------------------------------------------------------------------------------------------------ commands


def commands(page: Path) -> Iterator[list[str]]:
    for _, code in blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@pages
def test_commands_parse(page: Path) -> None:
    """Without running them: `hf-specdec` and scripts know their options, `make` its targets, `pip` the extras."""
    for words in commands(page):
        if words[0] == "torchrun":
            words = ["python", *words[words.index("--nproc-per-node") + 2 :]]
        check = {"hf-specdec": check_cli, "make": check_make, "pip": check_pip, "python": check_script}[words[0]]
        check(words[1:])


def check_cli(words: list[str]) -> None:
    name, *arguments = words
    command = typer.main.get_command(build_app()).commands[name]
    command.make_context(name, list(arguments))  # raises for unknown options and values of the wrong type
    result = CliRunner().invoke(build_app(), [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in (word for word in arguments if word.startswith("--")):
        assert option in result.output


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE), target
    for variable in (word.partition("=")[0] for word in words if "=" in word):
        assert f"{variable} ?=" in makefile, variable


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert extra in extras


def check_script(words: list[str]) -> None:
    words = words[2:] if words[0] == "-m" else words
    if words[0] == "pytest":
        words = [word.partition("::")[0] for word in words[1:] if word.startswith("tests")] or [""]
    source = ROOT / words[0]
    assert source.exists(), words[0]
    text = "".join(path.read_text() for path in source.parent.glob("*.py")) if source.suffix == ".py" else ""
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, option


def test_some_commands_were_found() -> None:
    assert sum(words[0] == "hf-specdec" for page in PAGES for words in commands(page)) >= 5


# --------------------------------------------------------------------------------------------------------------- names


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


@pages
def test_files_and_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    last = ""
    for path, test in re.findall(
        r"`((?:(?:tests|hf_specdec|examples|benchmarks|docs)/[\w/.-]+)?)(?:::)?(test_\w+)?`", text
    ):
        last = path or last
        assert (ROOT / last).exists(), last
        if test and not test.endswith(".py"):
            assert f"def {test}(" in (ROOT / last).read_text(encoding="utf-8"), f"{last}::{test}"
    for name in re.findall(r"\bhf_specdec\.([A-Z]\w+|last_metrics)", text):
        assert name in hf_specdec.__all__, name


def test_files_of_the_map_are_there() -> None:
    """A name without a folder lies in that of the one before it in the same cell."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    cells = page[page.index("## Map") : page.index("(In `hf_specdec/`.)")].split("|")
    files = 0
    for cell in cells:
        folder = ROOT / "hf_specdec"
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", cell):
            path = ROOT / "hf_specdec" / name
            path = path if path.exists() else folder / name
            assert path.exists(), name
            folder, files = path.parent if path.is_file() else path, files + 1
    assert files > 30


def messages() -> list[str]:
    """All strings of the library's source, with `…` for what is filled in."""
    found = []
    for path in (ROOT / "hf_specdec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_are_the_librarys() -> None:
    """Every line of the text blocks is part of a message, `…` being anything."""
    lines = [line for _, code in blocks(ROOT / "docs" / "troubleshooting.md", "text") for line in code.splitlines()]
    assert len(lines) > 20
    sources = messages()
    for line in lines:
        parts = [part for part in line.split("…") if len(part) >= 12]  # a short one may be filled in there
        assert parts, line
        pattern = re.compile(".*?".join(map(re.escape, parts)), flags=re.DOTALL)
        assert any(pattern.search(source) for source in sources), line


def test_the_table_of_families_is_that_of_the_tests() -> None:
    """Else: copy what `family_table` returns into the page."""
    assert family_table() in (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


@pages
def test_lines_are_short(page: Path) -> None:
    text = re.sub(r"<!-- sweep: begin -->.*<!-- sweep: end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not [line for line in text.splitlines() if len(line) > 120]


@pages
def test_items_of_lists_begin_lines(page: Path) -> None:
    """Else they are joined to the one before when the page is shown."""
    joined = re.findall(r"^.*[.:;] - (?:\*\*|`).*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert not joined
