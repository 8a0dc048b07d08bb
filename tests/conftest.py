import gc
import itertools
import os
import random
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


os.environ.setdefault("HF_HUB_OFFLINE", "1")
gc.disable()  # until tests are collected: what is imported stays, and each search for garbage goes through all of it

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from support.calls import telling_prompts  # noqa: E402
from support.cases import mark_the_rest_slow  # noqa: E402
from support.device_steps import Steps, install  # noqa: E402
from support.goldens import assert_target_is_unchanged  # noqa: E402
from support.models import noisy_copy, tiny_model  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import hf_specdec  # noqa: E402, F401  (installs the hook)
from hf_specdec.batching import SpeculativeBatchingManager  # noqa: E402


torch.set_num_threads(1)  # the models are so tiny that a second thread only costs, and costs much on a busy machine

settings.register_profile("the same examples every time", derandomize=True)
settings.load_profile("the same examples every time")


HERE = Path(__file__).parent
ANY_VERSION = {
    ".": (
        "docs docstrings examples gemma3_270m installs model_cards overflow packaging public_imports random_calls "
        "random_generators scripts smollm2 structure"
    ),
    "attention": "grouped_attention",
    "batching": (
        "adapters candidate_choice candidate_ways compiled_steps device_auto device_rows device_samples device_steps "
        "draft_temperatures equal_prompts faults graphs image_leads keeping limits logprobs paged_cache pauses "
        "pending_features policy prefix_cache random_mixes repeated_ends repeated_steps request_faults "
        "request_options requests results sampling scheduler shared_images soak spare_time starts_and_ends "
        "warming_up weights"
    ),
    "block": (
        "anchored calls confidence conversion damaged drafting formats heads mask_embedding pairs sampling "
        "shaped_trees usual_mistakes"
    ),
    "bulk": "answers output records",
    "checkpoints": "hub",
    "compiling": "early_launch kept merged_linears",
    "device_steps": (
        "auto_captures auto_dynamic by_position compiled drawing edges grammars greedy image_sampling memory sampling "
        "streams which_calls"
    ),
    "distributed": "data_parallel",
    "drafters": "eagle growth medusa ngram observed other_vocabulary padded_vocabularies",
    "eagle": (
        "card conversion damaged damaged_configs detected_layers detection layer_ids only_cache unroll usual_mistakes"
    ),
    "forwards": "chunks",
    "gemma": "sampling",
    "generation": "default_tree importing metrics",
    "grammar": "beginnings exact growing json requests texts",
    "models": "modules",
    "mtp": "sampling shared_prefixes",
    "replicas": "board front prefixes ray",
    "serving": (
        "access app calls_over_http choices contexts decoding demanded_calls ends_of_servers engine health "
        "http_server large_bodies load_benchmark long_answers parts python_calls server starting stop_strings streams"
    ),
    "serving/requests": "bad_requests",
    "states": "draft_steps kernels sampling",
    "sweep": "state_samples",
    "training": (
        "block_runs blocks continued_runs data description objectives openings packing processes reading "
        "self_generate texts_of_runs train train_command vocabulary"
    ),
    "verification": (
        "draft_temperature either_way exact_statistics own_processors reads_ahead rejection sampling_exactness target "
        "wrong_samplers"
    ),
}
ANY_VERSION_FOLDERS = ("benchmarking", "cards", "cli", "doctor", "graphs", "kernels", "rl", "space", "trees")
"""
Files of tests, by folder, and folders whose subject is the library's own: they call transformers at most in ways that
other tests check with every version. `make test-oldest` and `make test-newest` leave all but a few (`smoke`) out.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest_slow(items)
    places = [HERE / folder for folder in ANY_VERSION_FOLDERS]
    places += [HERE / folder / f"test_{name}.py" for folder, names in ANY_VERSION.items() for name in names.split()]
    own = {path: any(map(path.is_relative_to, places)) for path in {item.path for item in items}}
    for item in items:
        if own[item.path] and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.any_version)


def pytest_configure(config: pytest.Config) -> None:
    """Leaves seeds to the hooks below where `pytest-randomly` shuffles: it would draw others in every run."""
    if hasattr(config.option, "randomly_reset_seed"):
        config.option.randomly_reset_seed = False


def seed_all() -> None:
    # Not by torch.manual_seed: where CUDA has not begun, it notes its caller's stack each time, which takes longest.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    np.random.seed(0)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # what is still frozen when Python ends is told of as leaked


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """What tests share is the same whichever of them comes first."""
    if fixturedef.scope != "function":
        seed_all()
    return (yield)


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_not_searched_for_garbage() -> None:
    """A search through what torch and transformers keep takes 0.4 seconds, and every `Trainer` makes one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    seed_all()


@pytest.fixture(autouse=True)
def _phases_take_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Every phase of a step takes as long as any other, however busy the machine: which trees "auto" chooses on the host,
    as it does by default, depends on acceptance alone. (Measured times: tests/trees/test_auto_simulated.py and
    benchmarks/auto_speed.py.)
    """
    ticks = itertools.count()
    monkeypatch.setattr("hf_specdec.metrics.time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-3))


@pytest.fixture(autouse=True)
def _shared_target_stays_as_it_is() -> Iterator[None]:
    yield
    assert_target_is_unchanged()


@pytest.fixture
def default_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that name no tree take their draft's default tree, as on a GPU, and not "auto"."""
    monkeypatch.setattr("hf_specdec.plan.runs_on_cpu", lambda target: False)


@pytest.fixture
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Whole steps run here on the CPU: a stand-in for CUDA graphs, and the attention kernel in its plain version."""
    pytest.importorskip("triton", reason="the kernels need triton")
    return install(monkeypatch, with_kernel=getattr(request, "param", True))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Managers that are made, weakly."""
    found, init = [], SpeculativeBatchingManager.__init__

    def noted(self: SpeculativeBatchingManager, *args: Any, **options: Any) -> None:
        found.append(weakref.ref(self))
        init(self, *args, **options)

    monkeypatch.setattr(SpeculativeBatchingManager, "__init__", noted)
    return found


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """A tiny Llama in float64, for modules that have no target of their own."""
    return tiny_model()


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    """A draft that agrees with it often."""
    return noisy_copy(target, noise=0.05)


@pytest.fixture(scope="module")
def inputs_of(target: PreTrainedModel) -> dict[int, dict[str, torch.Tensor]]:
    """Prompts of 12 tokens by batch size; without padding for one sequence."""
    return {batch_size: telling_prompts(target, batch_size, 12) for batch_size in (1, 3)}
