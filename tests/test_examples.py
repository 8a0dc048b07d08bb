"""The scripts in examples/ run, and their greedy texts are those of plain `generate`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.goldens import TINY_TARGET, save_chat_target
from support.models import tiny_model
from support.servers import running_server
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_specdec import OnlineHead


EXAMPLES = Path(__file__).parent.parent / "examples"
OTHERS = {"common", "grpo_rollouts", "openai_client", "ray_data", "ray_serve"}
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - OTHERS)
PROMPT = "t1 t221 t106 t371 t387 t90 t32 t293"
HEAD = TINY_TARGET.parent / "safeailab_eagle3"

# How the tests call each of them, and the least number of greedy comparisons that it prints.
CALLS: dict[str, tuple[list[str], int]] = {
    "quickstart": (["--prompt", PROMPT], 1),
    "draft_model": (["--prompt", PROMPT, "--draft", str(TINY_TARGET)], 3),
    "eagle_head": (["--prompt", PROMPT, "--draft", str(HEAD)], 2),
    "ngram_code_editing": ([], 3),
    "custom_trees": (["--draft", str(TINY_TARGET), "--tree", "[(0,), (1,), (2,)]"], 8),
    "constrained_decoding": (["--prompt", "primes"], 2),
    "batch": ([], 2),
    "many_requests": ([], 4),
    "peft_lora": (["--prompt", PROMPT], 2),
    "quantized": (["--prompt", PROMPT, "--draft", str(HEAD)], 4),
    "train_head": (
        ["--prompt", PROMPT, "--texts", "24", "--max-length", "64", "--epochs", "1", "--batch-tokens", "512"],
        1,
    ),
}
PACKAGES = {"peft_lora": "peft", "quantized": "torchao"}
LONG = {"custom_trees", "eagle_head", "train_head"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs an example in this process, in an empty folder; returns its module and what it printed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str) -> tuple[ModuleType, str]:
        module = importlib.import_module(name)
        module.main(["--device", "cpu", *arguments])
        return module, capsys.readouterr().out

    return call


def letters(folder: Path) -> Path:
    """A tiny model whose tokens are single characters, digits and brackets among them."""
    characters = ["<pad>", "<s>", "</s>", *"0123456789,[] abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQR"]
    tokenizer = Tokenizer(WordLevel({character: place for place, character in enumerate(characters)}, "<pad>"))
    tokenizer.add_special_tokens(characters[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    model = tiny_model("llama", seed=5, dtype=torch.float32, attention_sharpness=3.0)
    assert model.config.vocab_size == len(characters)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return folder


def test_every_example_is_called() -> None:
    assert sorted(CALLS) == NAMES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NAMES]
)
def test_examples(name: str, run, tmp_path: Path) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"{PACKAGES[name]} is not installed")
    arguments, comparisons = CALLS[name]
    target = letters(tmp_path / "letters") if name == "constrained_decoding" else TINY_TARGET
    _, printed = run(name, "--target", str(target), "--max-new-tokens", "24", *arguments)
    answers = re.findall(r"\b(yes|no)$", printed, flags=re.MULTILINE)
    assert len(answers) == comparisons and set(answers) == {"yes"}, printed
    if name == "constrained_decoding":
        numbers = printed.rstrip().splitlines()[-1]
        assert re.match(r"\[\d", numbers) and not re.search(r"[^\d,\[\] ]|\]\S", numbers), printed


@pytest.mark.slow
def test_openai_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a server in a process of its own."""
    for package in ("openai", "fastapi", "prometheus_client", "uvicorn"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.syspath_prepend(EXAMPLES)
    target = save_chat_target(tmp_path / "target")
    options = ("--draft", str(HEAD), "--dtype", "float32", "--device", "cpu", "--num-blocks", "64")
    with running_server(str(target), *options, log=tmp_path / "log") as address:
        importlib.import_module("openai_client").main(["--url", f"{address}/v1", "--max-new-tokens", "24"])
    printed = capsys.readouterr().out
    assert "24 tokens, " in printed
    assert printed.endswith("identical: yes\n")
    assert float(re.search(r"tokens per step of a request: (.*)", printed)[1]) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_grpo_rollouts(run, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    call = ["--target", str(TINY_TARGET), "--draft", str(HEAD), "--max-new-tokens", "12", "--budget", "1"]
    call += ["--texts", "8", "--generations", "4", "--steps", "3", "--output", "found", "--ways"]
    run("grpo_rollouts", *call, "frozen")
    _, printed = run("grpo_rollouts", *call, "online", "none")
    found = re.findall(r"^(frozen|online|none) +3 +(\S+) → +(\S+)", printed, flags=re.MULTILINE)
    assert [way for way, *_ in found] == ["frozen", "online", "none"], printed
    assert all((float(first) > 1) == (way != "none") for way, first, _ in found)
    assert (tmp_path / "found" / "rollouts.png").stat().st_size > 5_000
    assert OnlineHead.from_pretrained(tmp_path / "found" / "head").num_steps > 0


def test_sampling(run) -> None:
    _, printed = run(
        "draft_model", "--target", str(TINY_TARGET), "--prompt", PROMPT, "--max-new-tokens", "16", "--sample"
    )
    assert "chain of 4" in printed and "yes" not in printed and "no\n" not in printed


def test_a_head_that_is_not_there(run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("eagle_head", "--target", str(TINY_TARGET), "--draft", "no/such/folder/here")
    assert "examples/train_head.py" in capsys.readouterr().err


def test_what_the_constraint_lets_through(run, tmp_path: Path) -> None:
    """Token by token, against the definition: a text is let through if some list of numbers begins with it."""
    module, _ = run("constrained_decoding", "--target", str(letters(tmp_path / "letters")), "--max-new-tokens", "4")
    processor = module.NumberList(PreTrainedTokenizerFast.from_pretrained(tmp_path / "letters"), 0, most=2)
    for text, following in {
        "": "[",
        "[": "123456789",
        "[1": "0123456789,]",
        "[123": ",]",
        "[1,": " ",
        "[1, ": "123456789",
        "[1, 23": "0123456789]",
    }.items():
        allowed = processor._allowed_after(text)
        assert "".join(sorted(processor.texts[token] for token in allowed)) == "".join(sorted(following)), text
    assert processor._allowed_after("[1, 234]") == [processor.tokenizer.eos_token_id]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "constrained_decoding"])
def test_examples_with_smollm2(name: str, run) -> None:
    """As a user runs them, only shorter."""
    _, printed = run(name, "--max-new-tokens", "24")
    assert "yes" in printed and " no\n" not in printed
