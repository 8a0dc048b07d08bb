"""What the Space shows of a run, against what the run wrote: where tokens come from, their text, and the trees."""

from __future__ import annotations

import pickle
import re
import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import noisy_copy, tiny_model
from support.parity import IRREGULAR
from support.tokenizer import tiny_tokenizer
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec import DynamicTree, NgramDraft, SpeculativeConfig


PROMPT = {"input_ids": torch.tensor([[5, 9, 33, 7, 41, 12]])}
TREES = {"static": IRREGULAR, "dynamic": DynamicTree(depth=4, top_k=3, num_nodes=9)}
NEW_TOKENS = 40


def record(space: SimpleNamespace, target: PreTrainedModel, draft: Any = None, **options: Any) -> Any:
    """The recording of a whole run."""
    *_, recording = space.decoding.decode(target, PROMPT, draft, max_new_tokens=NEW_TOKENS, **options)
    assert recording.done
    return recording


@pytest.fixture(params=["model, static", "model, dynamic", "ngram, dynamic", "model, sampled"])
def recording(request: pytest.FixtureRequest, space: SimpleNamespace, target: PreTrainedModel) -> Any:
    kind, how = request.param.split(", ")
    draft = noisy_copy(target, noise=0.3) if kind == "model" else NgramDraft()
    options = {"do_sample": how == "sampled", "speculative_config": SpeculativeConfig(tree=TREES.get(how, IRREGULAR))}
    return record(space, target, draft, **options)


def test_texts_are_those_of_generate(space: SimpleNamespace, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    expected = target.generate(**PROMPT, do_sample=False, max_new_tokens=NEW_TOKENS)[0, 6:].tolist()
    assert record(space, target, do_sample=False).ids == expected
    drafted = record(space, target, draft, do_sample=False, tree=IRREGULAR)
    assert drafted.ids == expected
    assert drafted.metrics.num_accepted_tokens > 0


@pytest.mark.some_cases(2)
def test_every_token_is_where_its_step_says(recording: Any) -> None:
    """Accepted tokens are those of the path's nodes, in order; the own token follows, and is no child if recovered."""
    tokens = recording.tokens
    assert tokens[0].step is None and tokens[0].origin == "plain"
    accepted = []
    for number, step in enumerate(recording.steps):
        of_step = [token for token in tokens if token.step == number]
        first = tokens.index(of_step[0])
        assert step.root == tokens[first - 1].id
        kept = [token for token in of_step if token.origin == "accepted"]
        assert [token.id for token in kept] == [step.tokens[node - 1] for node in step.path][: len(kept)]
        assert [token.depth for token in kept] == list(range(1, len(kept) + 1))
        for parent, node in zip([0, *step.path], step.path, strict=False):
            assert step.parents[node - 1] == parent
        accepted.append(len(kept))
        if len(of_step) > len(kept):
            (own,) = of_step[len(kept) :]
            last = step.path[-1] if step.path else 0
            children = [t for t, parent in zip(step.tokens, step.parents, strict=True) if parent == last and t >= 0]
            assert own.origin == ("plain" if not step.num_drafted else "recovered" if children else "bonus")
            assert own.id == step.own and own.id not in children
    assert accepted == recording.metrics.accepted_per_step[0]
    assert {token.origin for token in tokens} >= {"accepted", "recovered"}


def test_figures_on_the_way_are_those_of_the_end(
    space: SimpleNamespace, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    recording = space.decoding.Recording()
    drafter = space.decoding.ObservedDrafter(space.decoding.as_drafter(draft), recording.observe)
    recording.start()
    target.generate(
        **PROMPT,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        assistant_model=drafter,
        tree=IRREGULAR,
        streamer=recording,
    )
    metrics = hf_specdec.last_metrics()
    assert recording.metrics.num_drafts == metrics.num_drafts
    assert recording.metrics.accepted_per_step == []  # the only ones that need the end
    assert recording.metrics.num_accepted_per_position == metrics.num_accepted_per_position
    assert recording.metrics.num_draft_tokens == metrics.num_draft_tokens


def test_recordings_go_between_processes(recording: Any) -> None:
    """As they have to on ZeroGPU."""
    copied = pickle.loads(pickle.dumps(recording))
    assert (copied.tokens, copied.steps, copied.metrics) == (recording.tokens, recording.steps, recording.metrics)


def test_closing_ends_the_call(
    space: SimpleNamespace, target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space.decoding, "SECONDS_BETWEEN_UPDATES", 0.01)
    before = threading.active_count()
    run = space.decoding.decode(target, PROMPT, draft, do_sample=False, tree=IRREGULAR, max_new_tokens=20_000)
    recording = next(run)
    run.close()
    assert threading.active_count() == before
    assert len(recording.tokens) < 20_000 and not recording.done
    assert target.config._attn_implementation == "sdpa"


def test_refusals_reach_the_reader(space: SimpleNamespace, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="rank gaps"):
        record(space, target, draft, tree="[(1,)]", do_sample=True)
    with pytest.raises(ValueError, match="prompt is empty"):
        space.decoding.encode(tiny_tokenizer(), " \n", torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------------- text


def test_pieces_make_the_text(space: SimpleNamespace) -> None:
    """Also where a character is several tokens, and in the middle of one."""
    tokenizer = byte_tokenizer()
    words = space.text.Words(tokenizer)
    ids = tokenizer.encode("añb → 🌳🌳 c\n\nd")
    assert len(ids) > 15
    for count in range(len(ids) + 1):
        pieces = words.pieces(ids[:count])
        assert len(pieces) == count and "".join(pieces) == tokenizer.decode(ids[:count])
    assert words.alone(tokenizer.encode(" ")[0]) == "␣"


def byte_tokenizer() -> Any:
    """A token for every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_text_is_escaped_and_clickable(space: SimpleNamespace) -> None:
    tokenizer = byte_tokenizer()
    token = space.decoding.Token
    ids = tokenizer.encode("<b>&\n")
    recording = space.decoding.Recording([token(ids[0]), *(token(id_, "accepted", 9, 0) for id_ in ids[1:])])
    html = space.text.text_html(recording, space.text.Words(tokenizer), coloured=True, selected=0)
    assert "<b>" not in html and "&lt;" in html and "&amp;" in html
    assert html.count('data-step="0"') == html.count(f'class="t d{space.text.DEEPEST} chosen"') == len(ids) - 1


# --------------------------------------------------------------------------------------------------------------- trees


@pytest.mark.some_cases(2)
def test_trees_show_every_node(space: SimpleNamespace, recording: Any) -> None:
    """A box per node that counts, none over another; the accepted path in the colours of the text."""
    words = space.text.Words(tiny_tokenizer())
    for number, step in enumerate(recording.steps):
        summary = space.text.step_summary(step, number, len(recording.steps))
        svg = ElementTree.fromstring(space.drawing.tree_svg(step, words.alone, summary))
        assert svg.get("aria-label") == summary
        nodes = [group for group in svg.iter("g") if group.get("class").startswith("node ")]
        styles = [node.get("class").removeprefix("node ") for node in nodes]
        assert len(nodes) == 1 + step.num_drafted + (step.own is not None)
        deepest = space.text.DEEPEST
        expected = [f"d{min(depth, deepest)}" for depth in range(1, len(step.path) + 1)]
        assert sorted(style for style in styles if re.fullmatch(r"d\d", style)) == expected
        assert len([path for path in svg.iter("path") if path.get("class") == "walked"]) == len(step.path) + (
            step.own is not None
        )
        boxes = [tuple(float(node.find("rect").get(key)) for key in ("x", "y")) for node in nodes]
        width, height = space.drawing.WIDTH, space.drawing.HEIGHT
        for place, (x, y) in enumerate(boxes):
            assert x + width <= float(svg.get("width")) and y + height <= float(svg.get("height"))
            assert all(abs(x - a) >= width or abs(y - b) >= height for a, b in boxes[:place])


def test_verdicts(space: SimpleNamespace, target: PreTrainedModel) -> None:
    plain, other = record(space, target, do_sample=False), record(space, tiny_model(seed=5), do_sample=False)

    def verdict(*drafted: Any, greedy: bool = True, dtype: str = "float32", auto: bool = False) -> str:
        return space.text.verdict_html(plain, ["left", "right"], list(drafted), greedy, dtype, auto)

    place = next(i for i, (a, b) in enumerate(zip(plain.ids, other.ids, strict=True)) if a != b)
    assert "Identical" in verdict(plain) and "Identical" in verdict(plain, plain)
    assert "Identical" not in verdict(plain, other)
    assert f"right differs from token {place + 1} on" in verdict(plain, other, dtype="bfloat16")
    assert "left differs" not in verdict(plain, other)
    assert "same distribution" in verdict(plain, other, greedy=False)
    slow = replace(plain, seconds=2 * plain.seconds)
    assert "or auto" in verdict(plain, slow) and "or auto" not in verdict(plain, plain)
    assert "left <b>1.00×</b>, right <b>0.50×</b>" in verdict(plain, slow, auto=True)
    assert "or auto" not in verdict(plain, slow, auto=True)
