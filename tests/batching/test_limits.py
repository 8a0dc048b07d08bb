"""Limits that let nothing run are refused, by both of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import limits
from support.heads import tiny_head
from support.models import tiny_model
from transformers import PreTrainedModel

from hf_specdec import NgramDraft
from hf_specdec.batching import Limits
from hf_specdec.batching import limits as limits_module
from hf_specdec.batching.memory import available_host_memory, free_memory
from hf_specdec.cache.blocks import NUM_RESERVED


@pytest.mark.parametrize(
    "name, value",
    [
        ("block_size", 0),
        ("num_blocks", 0),
        ("num_blocks", -3),
        ("num_blocks", 2.5),
        ("max_requests", 0),
        ("chunk_size", 0),
        ("chunk_size", True),
        ("max_queue_size", -1),
        ("memory_share", 0.0),
        ("memory_share", 1.5),
    ],
)
def test_refusals(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{name}`.* but is {value!r}"):
        Limits(**{name: value})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_requests_per_batch": 0}, "`max_requests_per_batch` of a"),
        ({"max_batch_tokens": 0}, "`max_batch_tokens` of a"),
        ({"num_blocks": 0}, "`num_blocks`"),
        ({"block_size": 0}, "`page_size` of a"),
    ],
)
def test_refusals_of_transformers_config(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Limits.of(limits(**options), torch.device("cpu"))


@pytest.mark.parametrize("max_requests", [3, 200, 10_000])
@pytest.mark.parametrize("memory", [2_400_000, 16_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_and_features_fill_the_memory(
    dtype: torch.dtype, memory: int, max_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last block, as the manager allocates them: a head runs in its target's dtype, whatever its own."""
    model = tiny_model()
    head = tiny_head(model).to(dtype)
    monkeypatch.setattr(limits_module, "free_memory", lambda device: 2 * memory)
    given = Limits(block_size=4, memory_share=0.5, max_requests=max_requests)
    manager = model.init_continuous_batching(assistant_model=head, continuous_batching_config=given)
    with manager:
        manager.get_result(manager.add_request([5, 6, 7], max_new_tokens=3))
    caches = manager.engine.target.cache, manager.engine.drafting.cache
    layers = [layer for cache in caches for layer in cache.layers]
    used = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    a_block = used // (manager.engine.pool.num_blocks + NUM_RESERVED)
    features = manager.engine.drafting.features.held
    per_request = features[0].nbytes
    used += features.nbytes - 2 * per_request  # two places are nobody's
    assert used <= memory < used + a_block + per_request * (1 + NUM_RESERVED)


MEMINFO = "MemTotal:  9000 kB\nMemFree:  1000 kB\nMemAvailable:  6000 kB\n"
GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    "files, kib",
    [
        ({}, 6000),
        ({f"{GROUPS}/a/b/memory.max": "max", f"{GROUPS}/a/b/memory.current": "1024000"}, 6000),
        ({f"{GROUPS}/a/b/memory.max": "4096000", f"{GROUPS}/a/b/memory.current": "1024000"}, 3000),
        ({f"{GROUPS}/a/memory.max": "4096000", f"{GROUPS}/a/memory.current": "1024000"}, 3000),
        ({f"{GROUPS}/memory.max": "4096000", f"{GROUPS}/memory.current": "5120000"}, 0),
        (
            {
                f"{GROUPS}/a/b/memory.max": "4096000",
                f"{GROUPS}/a/b/memory.current": "3072000",
                f"{GROUPS}/a/b/memory.stat": "file 2048000\ninactive_file 1024000\nactive_file 1024000\n",
            },
            2000,
        ),
        ({f"{GROUPS}/a/b/memory.max": "99999999999", f"{GROUPS}/a/b/memory.current": "0"}, 6000),
        ({f"{GROUPS}/other/memory.max": "4096000", f"{GROUPS}/other/memory.current": "0"}, 6000),
    ],
    ids=["no limit", "max", "own", "parent's", "exceeded", "cached files", "more than there is", "another's"],
)
def test_host_memory(files: dict[str, str], kib: int, tmp_path: Path) -> None:
    """Pages of cached files are free, those of the machine and those of a container."""
    for name, text in ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "1:cpu:/x\n0::/a/b\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_host_memory(tmp_path) == kib * 1024


def test_host_memory_of_odd_files(tmp_path: Path) -> None:
    odd = {"proc/meminfo": b"\nMemAvailable:\n", "proc/self/cgroup": b"0::/\xff\n", f"{GROUPS}/memory.max": b"4096000"}
    odd |= {f"{GROUPS}/memory.current": b"1024000", f"{GROUPS}/memory.stat": b"inactive_file \n"}
    for name, text in odd.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert available_host_memory(tmp_path) == 3000 * 1024


def test_host_memory_where_it_is_not_told(tmp_path: Path) -> None:
    assert available_host_memory(tmp_path) > 0 and free_memory(torch.device("cpu")) > 0


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
def test_a_length_that_is_no_integer(target: PreTrainedModel, name: str) -> None:
    manager = target.init_continuous_batching(
        assistant_model=NgramDraft(), tree="[(0,)]", continuous_batching_config=limits()
    )
    with pytest.raises(TypeError, match=rf"`{name}` must be an integer, but is 6.5"):
        manager.add_request([5, 6, 7], **{name: 6.5})
