"""Two conventions of layer numbers are in use, and published configs do not say which is theirs."""

import pytest
from support.eagle import GOLDENS, publish, published

from hf_specdec.eagle import EagleConfig, EagleHead


# Published ids, the target's layers, and the hidden states that the head was trained on.
KNOWN = {
    "AQ-MedAI, Kimi-K2": ([2, 30, 58], 61, [2, 30, 58]),
    "SpecForge, DeepSeek-V3": ([1, 29, 57], 61, [2, 30, 58]),
    "nvidia/gpt-oss-120b-Eagle3-v3": ([24, 30, 36], 36, [24, 30, 36]),
    "ModelOpt's and SpecForge's default, 8B Llama": ([1, 15, 28], 32, [2, 16, 29]),
    "the default boundaries, 8B Llama": ([2, 16, 29], 32, [2, 16, 29]),
    "first layer's output": ([1, 20, 31], 36, [2, 21, 32]),
    "the embeddings' number, which is an output's": ([0, 4, 7], 12, [1, 5, 8]),
    "the first layer's output, not in order": ([20, 0, 31], 36, [1, 21, 32]),
    "0 beside a number that no output has": ([0, 4, 8], 8, [0, 4, 8]),
    "neither default": ([3, 20, 31], 36, [3, 20, 31]),
}


@pytest.mark.parametrize("known", KNOWN)
def test_told_from_the_numbers(known):
    ids, layers, boundaries = KNOWN[known]
    config = EagleConfig(aux_layer_ids=ids, aux_layer_convention="auto")
    assert config.aux_boundaries(layers) == boundaries


def test_said_outright():
    ids = [1, 15, 28]
    assert EagleConfig(aux_layer_ids=ids).aux_boundaries(32) == ids
    assert EagleConfig(aux_layer_ids=ids, aux_layer_convention="boundaries").aux_boundaries(32) == ids
    assert EagleConfig(aux_layer_ids=[2, 16, 29], aux_layer_convention="outputs").aux_boundaries(32) == [3, 17, 30]


@pytest.mark.parametrize("convention", ["auto", "boundaries", "outputs"])
@pytest.mark.parametrize(
    ("layers", "boundaries"), [(8, [2, 4, 5]), (32, [2, 16, 29]), (61, [2, 30, 58]), (80, [2, 40, 77])]
)
def test_absent(convention, layers, boundaries):
    """The defaults are the same layers in both conventions."""
    assert EagleConfig(aux_layer_convention=convention).aux_boundaries(layers) == boundaries


@pytest.mark.parametrize("known", KNOWN)
def test_only_numbers_that_leave_it_open_are_open(known):
    """Whatever target the head turns out to be for, unless one of its layers is named."""
    config = EagleConfig(aux_layer_ids=KNOWN[known][0], aux_layer_convention="auto")
    open_ones = {"neither default", "nvidia/gpt-oss-120b-Eagle3-v3"}
    assert config.has_open_numbering == (known in open_ones)
    assert not EagleConfig(aux_layer_ids=KNOWN[known][0]).has_open_numbering


@pytest.mark.parametrize("golden", ["specforge_eagle3", "modelopt_eagle3"])
@pytest.mark.parametrize(("ids", "boundaries", "warns"), [([0, 4, 6], [1, 5, 7], False), ([3, 4, 6], [3, 4, 6], True)])
def test_published_ids(golden, ids, boundaries, warns, tmp_path, caplog):
    config, weights = published(golden)
    config["eagle_config"] = config.get("eagle_config", {}) | {"eagle_aux_hidden_state_layer_ids": ids}
    folder = publish(tmp_path, config, weights)
    assert EagleHead.from_pretrained(folder).config.aux_boundaries(8) == boundaries
    assert [str(ids) in text and "hf-specdec doctor" in text for text in caplog.messages] == [True] * warns
    caplog.clear()
    for options in ({"aux_layer_ids": [2, 3, 4]}, {"aux_layer_convention": "outputs"}):
        EagleHead.from_pretrained(folder, **options)
    assert not caplog.messages


def test_ascending():
    assert EagleConfig(aux_layer_ids=[29, 2, 16]).aux_boundaries(32) == [2, 16, 29]


@pytest.mark.parametrize(
    ("ids", "convention", "layers"),
    [([2, 16, 33], "boundaries", 32), ([2, 16, 32], "outputs", 32), ([2, 16, 29], "auto", 24), (None, "auto", 2)],
)
def test_layers_that_the_target_does_not_have(ids, convention, layers):
    config = EagleConfig(aux_layer_ids=ids, aux_layer_convention=convention)
    with pytest.raises(ValueError, match=rf"`aux_layer_ids`=.* a target with {layers} layers"):
        config.aux_boundaries(layers)


def test_no_default_for_another_number():
    with pytest.raises(ValueError, match="reads 4 features, for which there is no default"):
        EagleConfig(num_aux_features=4).aux_boundaries(32)


@pytest.mark.parametrize(
    ("golden", "convention"),
    [("speculators_eagle3", "boundaries"), ("specforge_eagle3", "auto"), ("modelopt_eagle3", "auto")],
)
def test_conventions_of_formats(golden, convention):
    assert EagleHead.from_pretrained(GOLDENS / golden).config.aux_layer_convention == convention


def test_overridden_while_loading():
    folder = GOLDENS / "modelopt_eagle3"
    assert EagleHead.from_pretrained(folder).config.aux_boundaries(8) == [2, 4, 5]
    assert EagleHead.from_pretrained(folder, aux_layer_ids=[1, 3, 4]).config.aux_boundaries(8) == [1, 3, 4]
    for options in (
        {"aux_layer_ids": [2, 3, 4], "aux_layer_convention": "outputs"},
        {"aux_layer_convention": "outputs", "aux_layer_ids": [2, 3, 4]},
    ):
        assert EagleHead.from_pretrained(folder, **options).config.aux_boundaries(8) == [3, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux_layer_ids": [1, 2]}, r"`aux_layer_ids`=\[1, 2\] has 2 layers, but the head reads 3"),
        ({"aux_layer_ids": [1, "2", 3]}, "must be a list of layer numbers"),
        ({"aux_layer_ids": [-1, 2, 3]}, "must be a list of layer numbers"),
        ({"aux_layer_ids": 3}, "must be a list of layer numbers"),
        ({"aux_layer_convention": "inputs"}, "`aux_layer_convention` must be one of 'auto', 'boundaries', 'outputs'"),
        ({"eagle_version": 2}, "`eagle_version` must be 1 or 3, but is 2"),
        ({"draft_vocab_size": 0}, "`draft_vocab_size` must be a whole number of at least 1"),
        ({"target_hidden_size": "64"}, "`target_hidden_size` must be a whole number"),
    ],
)
def test_impossible_values(options, message):
    with pytest.raises(ValueError, match=message):
        EagleHead.from_pretrained(GOLDENS / "modelopt_eagle3", **options)
    with pytest.raises(ValueError, match=message):
        EagleConfig(**{"num_aux_features": 3} | options)
