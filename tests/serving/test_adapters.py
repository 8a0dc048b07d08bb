"""LoRA adapters that clients choose as models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import adapted, alone
from support.asking import text_of
from support.models import tiny_model
from support.servers import client_over
from support.tokenizer import tiny_tokenizer


for package in ("fastapi", "openai", "prometheus_client", "peft"):
    pytest.importorskip(package)

from hf_specdec import NgramDraft, SpeculativeConfig, loading  # noqa: E402
from hf_specdec.cli.serve_checks import adapters_in  # noqa: E402
from hf_specdec.serving.engine import process  # noqa: E402
from hf_specdec.serving.engine.options import EngineOptions, StartError  # noqa: E402


BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "abc xyz"}], "max_tokens": 8, "temperature": 0},
    "completions": {"prompt": "abc xyz", "max_tokens": 8, "temperature": 0},
    "responses": {"input": "abc xyz", "max_output_tokens": 8, "temperature": 0},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return adapted(tiny_model(max_position_embeddings=4096))


@pytest.fixture(scope="module")
def client(model: Any) -> Iterator[Any]:
    with client_over(model, name="base") as (client, _):
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_names_choose_adapters(path: str, client: Any, model: Any) -> None:
    """No name, or that of the model, is the model without adapters, whatever is active."""
    tokenizer, texts = tiny_tokenizer(), {}
    for name in ("a", "b@main", "base", None):
        answer = client.post(f"/v1/{path}", json=BODIES[path] | {"model": name}).json()
        assert answer["model"] == (name or "base").removesuffix("@main")
        adapter = None if name in ("base", None) else answer["model"]
        tokens = alone(model, adapter, tokenizer("abc xyz")["input_ids"], max_new_tokens=8)
        texts[name] = text_of(answer)
        assert texts[name] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(set(texts.values())) == 3


def test_adapters_are_listed(client: Any) -> None:
    base, *adapters = client.get("/v1/models").json()["data"]
    assert base["id"] == "base" and base["parent"] is None
    assert [(one["id"], one["parent"], one["object"]) for one in adapters] == [(n, "base", "model") for n in "abc"]
    assert client.get("/v1/models/b").json() == adapters[1]
    assert '"b"' in client.post("/load_model", json={"model": "b"}).text


def test_unknown_names(client: Any) -> None:
    answers = [client.post(f"/v1/{path}", json=body | {"model": "d"}) for path, body in BODIES.items()]
    for answer in (*answers, client.get("/v1/models/d")):
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 404 and error["type"] == "invalid_request_error"
        assert error["message"] == "`model='d'` is not served here, but 'base' (with the adapters 'a', 'b', 'c') is."


# ---------------------------------------------------------------------------------------------------------- the start


def test_options() -> None:
    assert adapters_in(["sql=some/folder", "de=a=b"], "base") == {"sql": "some/folder", "de": "a=b"}
    for options, reason in ((["sql"], "NAME=FOLDER"), (["a=x", "a=y"], "two models"), (["base=x"], "two models")):
        with pytest.raises(ValueError, match=reason):
            adapters_in(options, "base")
    with pytest.raises(ValueError, match="dot"):
        adapters_in(["v1.5=x"], "base")


def test_adapters_are_loaded(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From folders, as PEFT saves them; the manager then warms up for requests that choose."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(loading, "load_target", lambda *args, **options: tiny_model(max_position_embeddings=4096))
    monkeypatch.setattr(loading, "load_tokenizer", lambda *args: tiny_tokenizer())
    monkeypatch.setattr(loading, "load_draft_to", lambda *args: NgramDraft())
    for name, options in (("b", {}), ("odd", {"use_dora": True})):
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False, **options)
        torch.manual_seed(1)
        peft.get_peft_model(tiny_model(max_position_embeddings=4096), config).save_pretrained(tmp_path / name)
    given = EngineOptions(
        None,
        "ngram",
        SpeculativeConfig(),
        "cpu",
        "float32",
        num_blocks=20,
        adapters=dict.fromkeys(("sql", "it"), str(tmp_path / "b")),
    )
    manager, _ = process.load(given)
    assert manager.adapters == ["sql", "it"] and manager.engine.target.adapters.is_wanted
    tuned = peft.PeftModel.from_pretrained(tiny_model(max_position_embeddings=4096), tmp_path / "b").eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = tuned.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    with manager:
        name = manager.add_request([5, 6, 7], max_new_tokens=12, do_sample=False, adapter="sql")
        assert manager.get_result(name, timeout=60).generated_tokens == expected[0, 3:].tolist()
    for place, reason in ((str(tmp_path / "odd"), "DoRA"), (str(tmp_path / "none"), "none")):
        with pytest.raises(StartError, match=reason) as found:
            process.load(replace(given, adapters={"sql": place}))
        assert found.value.option == "--lora"
