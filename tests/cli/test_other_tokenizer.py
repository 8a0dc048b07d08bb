"""Commands with a draft of another tokenizer, and the engine of `hf-specdec serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.benchmarking import invoke, last_line
from support.other_vocabulary import FEW_SHARED, MANY_SHARED, byte_level, draft_of, target_tokenizer
from support.sampling import the_target

from hf_specdec import SpeculativeConfig
from hf_specdec.drafters import OtherVocabularyDrafter
from hf_specdec.loading import load_draft_to
from hf_specdec.serving.engine.options import EngineOptions, StartError
from hf_specdec.serving.engine.process import load


WAYS = {"tokens": (MANY_SHARED, "4 of the target's 6"), "texts": (FEW_SHARED, "2 of the target's 6")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target, the drafts, and a draft without the files of a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    found = {name: root / name for name in ("target", "alone", *WAYS)}
    target_tokenizer().save_pretrained(found["target"])
    for name in ("target", "alone"):
        the_target().save_pretrained(found[name])
    for name, (pieces, _) in WAYS.items():
        for part in draft_of(pieces):
            part.save_pretrained(found[name])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_commands(way: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """They say in a line how it drafts, and time transformers' own way beside it."""
    models = ("--draft", folders[way], "--device", "cpu", "--max-new-tokens", 8)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abbcab\n")
    bench = ("--prompts", prompts, "--rounds", 1, "--tree", "chain:2", "--baseline", "assisted")
    result = invoke("bench", folders["target"], *models, *bench)
    assert result.exit_code == 0, result.output
    assert result.stderr.count(WAYS[way][1]) == 1 and f"in {'the tokens' if way == 'tokens' else way}" in result.stderr
    rows = {row["contender"]: row for row in last_line(result)["results"]}
    assert rows["tree chain:2"]["identical"] == 1 and rows["assisted, chain of 5"]["tokens"] > 0
    result = invoke("demo", "--target", folders["target"], *models, "--prompt", "abbc", "--rounds", 1)
    assert result.exit_code == 0 and "identical: yes" in result.output and WAYS[way][1] in result.output


@pytest.mark.slow
def test_tune(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abbcab\n")
    options = ("--prompts", prompts, "--rounds", 1, "--max-nodes", 2, "--max-depth", 2, "--max-new-tokens", 8)
    result = invoke("tune", folders["target"], "--draft", folders["tokens"], "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    assert WAYS["tokens"][1] in result.stderr


def engine_of(folders: dict[str, Path], draft: str) -> Any:
    config = SpeculativeConfig(tree="[(0,)]")
    options = {"target": str(folders["target"]), "draft": str(folders[draft]), "speculative_config": config}
    return load(EngineOptions(**options, device="cpu", dtype="float32", num_blocks=60))[0]


@pytest.mark.parametrize("way", WAYS)
def test_engines_of_servers(way: str, folders: dict[str, Path]) -> None:
    drafting = engine_of(folders, way).engine.drafting
    assert isinstance(drafting.drafter, OtherVocabularyDrafter) and WAYS[way][1] in drafting.about


def test_drafts_of_the_targets_tokenizer_are_as_before(folders: dict[str, Path]) -> None:
    """Also without a tokenizer of their own, and with other roles, as before and after instruction tuning."""
    assert engine_of(folders, "alone").engine.drafting.about is None
    tokenizer = target_tokenizer().__class__.from_pretrained(folders["target"], eos_token="<bos>")
    draft = load_draft_to(str(folders["target"]), torch.float32, "cpu", the_target(), tokenizer)
    assert not isinstance(draft, OtherVocabularyDrafter)


def test_what_shares_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    the_target().save_pretrained(tmp_path)
    byte_level(["x", "<s>", "</s>", "y"], "<s>", "</s>").save_pretrained(tmp_path)
    with pytest.raises(StartError, match="share no text") as error:
        engine_of({**folders, "none": tmp_path}, "none")
    assert error.value.option == "--draft"
