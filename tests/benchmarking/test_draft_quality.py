"""benchmarks/draft_quality.py and benchmarks/write_card.py: results as they come, and the cards made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draft_quality
import prompts
import pytest
import torch
import write_card
from huggingface_hub import ModelCard
from support.benchmarking import HEAD
from support.goldens import TINY_TARGET


TEXTS = ["t1 t221 t106 t371", "t1 t5 t6 t7 t8", "t1 t90 t32 t293"]


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prompts that the tiny target's tokenizer knows."""
    for task in ("chat", "code"):
        monkeypatch.setattr(prompts, task, lambda number: TEXTS[:number])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def arguments(path: Path, draft: Path = HEAD, *more: str) -> list[str]:
    words = ["--target", TINY_TARGET, "--draft", draft, "--json", path, "--device", "cpu", "--threads", "1"]
    words += ["--prompts", 2, "--speed-prompts", 1, "--max-new-tokens", 12, "--rounds", 1, *more]
    return [str(word) for word in words]


@pytest.fixture
def results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, dict[str, Any]]:
    """A file of a whole run with a head, and what the run printed last."""
    path = tmp_path / "results.json"
    draft_quality.main(arguments(path))
    return path, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_the_file_is_what_is_printed_last(results: tuple[Path, dict[str, Any]]) -> None:
    path, printed = results
    assert json.loads(path.read_text()) == printed
    assert printed["identical_in_float32"] == [2, 2]
    assert (printed["target"], printed["draft"]) == ("tiny_target", "safeailab_eagle3")
    found = printed["measurements"]
    ways = {(m["temperature"], m["draft_sampling"], m["verification"]) for m in found}
    assert ways == {(0, "greedy", "target"), (1, "greedy", "target"), (1, "sample", "rejection")}
    accepted = [m for m in found if m["tokens_per_second"] is None]
    timed = [m for m in found if m["tokens_per_second"] is not None]
    assert len(accepted) == 2 * (3 + 2 * 3) and len(timed) == 2 * 4
    for measured in found:
        depths = measured["acceptance_per_position"]
        assert measured["mean_acceptance_length"] == pytest.approx(1 + sum(depths))
        assert depths == sorted(depths, reverse=True)
    assert max(m["mean_acceptance_length"] for m in found) > 1.2


def test_a_run_that_is_cut_short_leaves_what_it_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, measured = tmp_path / "results.json", []
    whole = draft_quality.acceptance

    def acceptance(*everything: Any) -> Any:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(whole(*everything))
        return measured[-1]

    monkeypatch.setattr(draft_quality, "acceptance", acceptance)
    with pytest.raises(KeyboardInterrupt):
        draft_quality.main(arguments(path))
    left = json.loads(path.read_text())["measurements"]
    assert [m["mean_acceptance_length"] for m in left] == [m.mean_acceptance_length for m in measured]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_the_card_of_a_head(results: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, printed = results
    folder = tmp_path / "my-head"
    shutil.copytree(HEAD, folder)
    main = write_card.main
    main(["--head", str(folder), "--results", str(path), "--cpu-results", str(path)])
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0" and card.data.model_name == "my-head"
    lengths = {result.metric_value for result in card.data.eval_results}
    assert lengths <= {round(m["mean_acceptance_length"], 4) for m in printed["measurements"]}
    assert json.loads((folder / "measurements.json").read_text())["measurements"] == 2 * [
        {name: value for name, value in m.items() if value is not None} for m in printed["measurements"]
    ]
    assert card.text.count("| HumanEval, 2 problems | tree of 60 | 1 | sample | rejection |") == 2
    assert 'from_pretrained("my-head")' in card.text


@pytest.mark.slow
def test_a_block_head_is_measured_and_gets_a_card(tmp_path: Path) -> None:
    folder, path = tmp_path / "my-block-head", tmp_path / "results.json"
    shutil.copytree(TINY_TARGET.parent / "dspark", folder)
    draft_quality.main(arguments(path, folder, "--prompts", "0"))
    found = json.loads(path.read_text())["measurements"]
    assert max(m["mean_acceptance_length"] for m in found) > 1.2
    main = write_card.main
    main(["--head", str(folder), "--results", str(path)])
    card = ModelCard.load(folder / "README.md")
    assert 'BlockHead.from_pretrained("my-block-head")' in card.text and "| its own | 0 |" in card.text


@pytest.mark.slow
def test_a_draft_model_is_measured_with_our_chain_and_gets_a_card(tmp_path: Path) -> None:
    """The target drafts for itself: with `tree=` left out, our chain of 5 accepts all."""
    folder, path = tmp_path / "my-draft", tmp_path / "results.json"
    shutil.copytree(TINY_TARGET, folder)
    draft_quality.main(arguments(path, folder, "--prompts", "0"))
    found = json.loads(path.read_text())["measurements"]
    assert {m["batch_size"] for m in found} == {1} and len(found) == 2 * 4
    own = [m for m in found if m["tree"] == "its own"]
    assert all(len(m["acceptance_per_position"]) == 5 and m["acceptance_per_position"][0] == 1 for m in own)
    main = write_card.main
    main(["--draft", str(folder), "--target", "owner/target", "--results", str(path), "--repo-id", "me/draft"])
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("transformers", "owner/target")
    assert '"assistant_model": draft, "tree": ' in card.text and "| its own | 0 |" in card.text


@pytest.mark.parametrize(
    "document, message",
    [
        ({"identical_in_float32": [3, 4], "measurements": []}, "1 of 4 texts"),
        ({"results": []}, "is not a file"),
        ({"identical_in_float32": [4, 4], "measurements": [{"tree": "x"}]}, "is not a file"),
        ([], "is not a file"),
    ],
)
def test_results_that_no_card_is_made_of(tmp_path: Path, document: Any, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        write_card.main(["--head", str(tmp_path), "--results", str(path)])
    assert list(tmp_path.iterdir()) == [path]
