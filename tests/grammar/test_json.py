"""Whatever a random model writes by a JSON schema is JSON of that schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
import torch
from llguidance import LLMatcher
from support.grammar import json_tokenizer
from support.models import noisy_copy, tiny_model
from transformers import PreTrainedModel

from hf_specdec import NgramDraft, last_metrics


WORD = {"type": "string", "maxLength": 4, "pattern": "^[a-e]*$"}
SCHEMAS: list[Any] = [
    {"type": "boolean"},
    {"enum": ["abc", "ad", 12, None]},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"abcdef": WORD, "b": {"type": "boolean"}, "cab": {"enum": ["a", "b"]}},
        "required": ["abcdef", "cab"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "leaf": {"type": "object", "properties": {"a": WORD}, "required": ["a"], "additionalProperties": False}
        },
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"const": "facade"}, {"type": "null"}]},
        "maxItems": 3,
    },
]


@pytest.fixture(scope="module")
def writer() -> PreTrainedModel:
    return tiny_model(vocab_size=len(json_tokenizer()), max_position_embeddings=2048)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_texts_are_json_of_their_schema(writer: PreTrainedModel, number: int):
    schema, draw = SCHEMAS[number], random.Random(number)
    accepted = 0
    for assistant in (NgramDraft(), noisy_copy(writer, noise=0.05)):
        # Without white space, of which a random model writes any amount.
        options = {"whitespace_flexible": False}
        found = writer.generate(
            input_ids=torch.tensor([[draw.randrange(2, 40) for _ in range(5)] for _ in range(4)]),
            attention_mask=torch.ones(4, 5, dtype=torch.long),
            grammar=LLMatcher.grammar_from_json_schema(schema, defaults=options),
            tokenizer=json_tokenizer(),
            assistant_model=assistant,
            tree="[(0,), (1,), (0, 0)]",
            eos_token_id=1,
            pad_token_id=0,
            do_sample=True,
            max_new_tokens=120,
        )
        accepted += last_metrics().num_accepted_tokens
        for text in json_tokenizer().batch_decode(found[:, 5:], skip_special_tokens=True):
            jsonschema_rs.validate(schema, json.loads(text))
    assert accepted > 0
