"""Answers about models that hold for a while."""

from __future__ import annotations

import threading

import pytest
import torch
from support.models import noisy_copy, tiny_model

from hf_specdec.models.asked_once import asked_once, asking_once
from hf_specdec.models.modules import modules_of


def test_a_question_is_asked_once_inside_a_context() -> None:
    """Of each model, and in this thread; outside and in a context of its own it is asked each time."""
    asked: list[object] = []

    @asked_once
    def number_of(model: object) -> int:
        asked.append(model)
        return len(asked)

    first, second = object(), object()
    assert [number_of(first), number_of(first)] == [1, 2]
    with asking_once():
        assert [number_of(first), number_of(second), number_of(first)] == [3, 4, 3]
        with asking_once():
            assert [number_of(first), number_of(first)] == [5, 5]
        thread = threading.Thread(target=number_of, args=(first,))
        thread.start()
        thread.join()
        assert [number_of(first), len(asked)] == [3, 6]
    assert number_of(first) == 7


def test_answers_end_with_their_context() -> None:
    """In an exception, too."""
    model = tiny_model()
    with pytest.raises(KeyError), asking_once():
        before = len(modules_of(model))
        model.added = torch.nn.Linear(1, 1)
        assert len(modules_of(model)) == before
        raise KeyError
    assert len(modules_of(model)) == before + 1


def test_a_call_sees_what_has_changed_since_the_last_one() -> None:
    """A mode, and a forward of the user's own, between two calls on the same models."""
    target = tiny_model(dtype=torch.float32)
    draft, ids = noisy_copy(target, 0.02), torch.tensor([[5, 9, 3, 7]])
    options = {"assistant_model": draft, "tree": "[(0,), (1,)]", "max_new_tokens": 6, "do_sample": False}
    text = target.generate(ids, **options)
    forward = target.forward
    target.forward = lambda input_ids, attention_mask=None, past_key_values=None, use_cache=None: None  # type: ignore
    with pytest.raises(ValueError, match="takes no `position_ids`|which the nodes of a tree need"):
        target.generate(ids, **options)
    target.forward = forward
    assert torch.equal(target.generate(ids, **options), text)
