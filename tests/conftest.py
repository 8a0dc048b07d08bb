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

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from support.calls import telling_prompts  # noqa: E402
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
ANY_VERSION = (
    "batching/test_candidate_choice.py",
    "batching/test_compiled_steps.py",
    "batching/test_device_auto.py",
    "batching/test_device_rows.py",
    "batching/test_device_samples.py",
    "batching/test_draft_temperatures.py",
    "batching/test_faults.py",
    "batching/test_graphs.py",
    "batching/test_keeping.py",
    "batching/test_limits.py",
    "batching/test_paged_cache.py",
    "batching/test_pauses.py",
    "batching/test_policy.py",
    "batching/test_prefix_cache.py",
    "batching/test_random_mixes.py",
    "batching/test_repeated_ends.py",
    "batching/test_repeated_steps.py",
    "batching/test_request_faults.py",
    "batching/test_results.py",
    "batching/test_sampling.py",
    "batching/test_scheduler.py",
    "batching/test_soak.py",
    "batching/test_starts_and_ends.py",
    "batching/test_pending_features.py",
    "batching/test_warming_up.py",
    "batching/test_weights.py",
    "benchmarking",
    "bulk/test_output.py",
    "bulk/test_records.py",
    "block/test_calls.py",
    "block/test_conversion.py",
    "block/test_damaged.py",
    "block/test_formats.py",
    "block/test_heads.py",
    "block/test_sampling.py",
    "block/test_usual_mistakes.py",
    "cards",
    "cli",
    "device_steps/test_compiled.py",
    "device_steps/test_drawing.py",
    "device_steps/test_edges.py",
    "device_steps/test_greedy.py",
    "device_steps/test_memory.py",
    "device_steps/test_sampling.py",
    "device_steps/test_streams.py",
    "device_steps/test_which_calls.py",
    "distributed/test_data_parallel.py",
    "doctor",
    "drafters/test_eagle.py",
    "drafters/test_growth.py",
    "drafters/test_medusa.py",
    "drafters/test_ngram.py",
    "drafters/test_observed.py",
    "drafters/test_padded_vocabularies.py",
    "eagle/test_card.py",
    "eagle/test_conversion.py",
    "eagle/test_damaged.py",
    "eagle/test_damaged_configs.py",
    "eagle/test_detected_layers.py",
    "eagle/test_detection.py",
    "eagle/test_layer_ids.py",
    "eagle/test_unroll.py",
    "eagle/test_usual_mistakes.py",
    "forwards/test_chunks.py",
    "compiling/test_merged_linears.py",
    "models/test_modules.py",
    "mtp/test_sampling.py",
    "gemma/test_sampling.py",
    "compiling/test_early_launch.py",
    "generation/test_default_tree.py",
    "generation/test_importing.py",
    "generation/test_metrics.py",
    "graphs",
    "kernels",
    "rl",
    "serving/test_contexts.py",
    "serving/test_ends_of_servers.py",
    "serving/test_engine.py",
    "serving/test_http_server.py",
    "serving/test_large_bodies.py",
    "serving/test_load_benchmark.py",
    "serving/test_long_answers.py",
    "serving/test_parts.py",
    "serving/test_server.py",
    "serving/test_stop_strings.py",
    "serving/test_streams.py",
    "space",
    "test_docs.py",
    "test_docstrings.py",
    "test_examples.py",
    "test_gemma3_270m.py",
    "test_installs.py",
    "test_model_cards.py",
    "test_overflow.py",
    "test_packaging.py",
    "test_public_imports.py",
    "test_random_calls.py",
    "test_random_generators.py",
    "test_scripts.py",
    "test_structure.py",
    "test_smollm2.py",
    "training/test_block_runs.py",
    "training/test_blocks.py",
    "training/test_continued_runs.py",
    "training/test_data.py",
    "training/test_description.py",
    "training/test_objectives.py",
    "training/test_openings.py",
    "training/test_packing.py",
    "training/test_processes.py",
    "training/test_reading.py",
    "training/test_self_generate.py",
    "training/test_texts_of_runs.py",
    "training/test_train.py",
    "training/test_train_command.py",
    "training/test_vocabulary.py",
    "trees",
    "verification/test_draft_temperature.py",
    "verification/test_exact_statistics.py",
    "verification/test_own_processors.py",
    "verification/test_reads_ahead.py",
    "verification/test_rejection.py",
    "verification/test_sampling_exactness.py",
    "verification/test_target.py",
    "verification/test_wrong_samplers.py",
)
"""
Folders and files of tests whose subject is the library's own: they call transformers at most in ways that other tests
check with every version. `make test-oldest` and `make test-newest` leave them out, but for a few (`smoke`).
"""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [HERE / place for place in ANY_VERSION]
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
