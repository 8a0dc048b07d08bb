"""The trained tiny target, and texts that it wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.goldens import trained_target, trained_tokenizer

from hf_specdec.training.data import Text
from hf_specdec.training.scripts import Template
from hf_specdec.training.self_generate import Sampling, Writer


os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(scope="session")
def written() -> list[Text]:
    """48 texts of at most 64 tokens."""
    target = trained_target()
    template = Template(trained_tokenizer(), target)
    writer = Writer(target, 64, 24, sampling=Sampling(greedy_share=0.2))
    return sorted(writer.write((job, template.both_sides()) for job in range(48)), key=lambda text: text.job)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, written: list[Text]) -> Path:
    """The same, as a file of tokens."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(text.to_json() + "\n" for text in written))
    return path
