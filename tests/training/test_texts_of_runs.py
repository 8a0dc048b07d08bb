"""The texts of a run: which count, which are held out, and how few or long they may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.chat import chat_tokenizer
from support.goldens import trained_target
from support.training import RUN

from hf_specdec.training import TrainOptions, recipe, train
from hf_specdec.training.checkpoints import newest_complete
from hf_specdec.training.corpus import Corpus
from hf_specdec.training.data import Text


@pytest.mark.parametrize(
    ("epochs", "batch_tokens", "rows"), [(3.0, None, 1), (100.0, None, 4), (1000.0, None, 256), (3.0, 512, 8)]
)
def test_steps_from_little_data(
    epochs: float, batch_tokens: int | None, rows: int, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `batch_tokens` a step has so few rows that there are 100 steps, at least one row and at most 16384."""
    made: list[tuple[Any, int]] = []

    def note(self: Any, num_rows: int) -> Any:
        made.append((arguments_of(self, num_rows), num_rows))
        raise KeyboardInterrupt

    arguments_of = recipe._Run._arguments
    monkeypatch.setattr(recipe._Run, "_arguments", note)
    lines: list[str] = []
    options = RUN | {"batch_tokens": batch_tokens, "rows_at_once": 256}
    with pytest.raises(KeyboardInterrupt):
        train(TrainOptions(output=str(tmp_path), data=str(data), epochs=epochs, **options), report=lines.append)
    ((arguments, num_rows),) = made
    found = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    if batch_tokens is None:
        rows = min(16384 // 64, max(1, int(epochs * num_rows / 100)))
        assert any("--batch-tokens" in line for line in lines) == (rows < 256)
    assert found == rows


def test_questions_are_learned_on_demand(tmp_path: Path, written: list[Text]) -> None:
    """Of texts without any answer, nothing is learned, or everything."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(Text(text.input_ids, []).to_json() + "\n" for text in written))
    options = {"data": str(path), "epochs": 0.1, **RUN}
    with pytest.raises(ValueError, match="something to predict is 0;"):
        train(TrainOptions(output=str(tmp_path / "answers"), **options))
    assert train(TrainOptions(output=str(tmp_path / "all"), loss_on_everything=True, **options)).finished


def long_texts(path: Path) -> Path:
    """Six texts of 160 tokens, each of one token throughout."""
    texts = [Text([10 + number] * 160, [(0, 160)]) for number in range(6)]
    path.write_text("".join(text.to_json() + "\n" for text in texts))
    return path


def test_no_piece_of_a_held_out_text_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[set[int]] = []
    original = recipe.Rows

    def noting(texts: list[Text], *arguments: Any) -> Any:
        sides.append({text.input_ids[0] for text in texts})
        return original(texts, *arguments)

    monkeypatch.setattr(recipe, "Rows", noting)
    data = long_texts(tmp_path / "texts.jsonl")
    options = RUN | {"eval_texts": 2}
    train(TrainOptions(output=str(tmp_path / "out"), data=str(data), max_seconds=1e-3, **options))
    trained_on, held_out = sides
    assert (len(trained_on), len(held_out)) == (5, 1) and not trained_on & held_out


@pytest.mark.slow
def test_runs_of_earlier_versions_go_on_if_no_text_was_cut(tmp_path: Path, data: Path) -> None:
    """Their checkpoints have empty marks. The split of texts that fit is the same; that of longer ones is not."""
    for source, is_refused in ((data, False), (long_texts(tmp_path / "long.jsonl"), True)):
        output = tmp_path / source.stem
        options = {"output": str(output), "data": str(source), "epochs": 3.0, **RUN}
        train(TrainOptions(max_seconds=1e-3, **options))
        checkpoint = newest_complete(output)
        assert checkpoint is not None
        (checkpoint / "complete").write_text("")
        if not is_refused:
            assert train(TrainOptions(**options)).finished
            continue
        with pytest.raises(ValueError, match="run of an earlier version"):
            train(TrainOptions(**options))


def test_one_text_is_enough_if_none_is_held_out(tmp_path: Path) -> None:
    data = tmp_path / "book.jsonl"
    data.write_text(Text(list(range(5, 245)), [(0, 240)]).to_json() + "\n")
    options = {"output": str(tmp_path / "out"), "data": str(data), "epochs": 1.0, **RUN}
    with pytest.raises(ValueError, match="something to predict is 1;.*With `eval_texts=0`"):
        train(TrainOptions(**options))
    assert train(TrainOptions(**options | {"eval_texts": 0})).finished


def test_texts_longer_than_the_target_can_read_are_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="`max_length`=4096: the target has 2048 positions"):
        train(TrainOptions(output=str(tmp_path), data=str(data), **RUN | {"max_length": 4096}))


def test_what_was_written_twice_counts_once(tmp_path: Path) -> None:
    """As greedy answers to the same question are; the order is that of the conversations, whoever wrote them."""
    options = TrainOptions(output=str(tmp_path), self_generate=5, **RUN)
    texts = [Text([1, 9, 9, 4], [(1, 4)], 0), Text([1, 8, 7, 5], [(1, 4)], 1), Text([1, 9, 9, 4], [(1, 4)], 3)]
    for rank, written in enumerate(([texts[2], texts[1]], [texts[0]])):
        (tmp_path / f"written-{rank:05d}.jsonl").write_text("".join(text.to_json() + "\n" for text in written))
    (tmp_path / "complete").touch()
    found = Corpus(options, tmp_path, trained_target(), chat_tokenizer()).texts()
    assert found is not None
    assert [[list(piece.input_ids) for piece in text] for text in found] == [[[1, 9, 9, 4]], [[1, 8, 7, 5]]]


def test_what_the_data_repeats_counts_once(tmp_path: Path, data: Path) -> None:
    """Else a text that is held out may be trained on."""
    twice = tmp_path / "twice.jsonl"
    twice.write_text(data.read_text() * 2)
    counts = []
    for path in (data, twice):
        options = TrainOptions(output=str(tmp_path), data=str(path), **RUN)
        texts = Corpus(options, tmp_path / path.stem, trained_target(), chat_tokenizer()).texts()
        counts.append(len(texts or ()))
    assert counts[0] == counts[1] > 8
