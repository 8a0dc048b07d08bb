"""The kernels as a package: what it needs, what it refuses, how it is built, compiled and tested by itself."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from setuptools import find_packages
from support.graphs import ReadFromOutside, pass_dispatcher_by
from torch.utils._pytree import tree_leaves

import hf_specdec_kernels
from hf_specdec.kernels import kernels_are_installed


FOLDER = Path(__file__).parents[2] / "kernels" / "hf-specdec-kernels"


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=variables)


def test_importing_needs_no_triton() -> None:
    hidden = "import sys; sys.modules['triton'] = None; "
    done = run(sys.executable, "-c", hidden + "import hf_specdec, hf_specdec_kernels")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("installed, suits", [("3.3.1", False), ("3.4.0", True), ("3.9.0", True), (None, True)])
def test_triton_is_new_enough(installed: str | None, suits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one has no waits of early launches, which the kernels name; a build of another name is believed."""
    pytest.importorskip("triton")

    def of_installed(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("importlib.metadata.version", of_installed)
    assert kernels_are_installed.__wrapped__() is suits


def test_all_packages_of_the_kernel_are_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As setuptools finds packages, for the wheel and for editable installs."""
    monkeypatch.chdir(FOLDER.parents[1])
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    options = project["tool"]["setuptools"]["packages"]["find"]
    found = {package for where in options["where"] for package in find_packages(where, include=options["include"])}
    source = FOLDER / "torch-ext"
    folders = {file.parent.relative_to(source) for file in (source / "hf_specdec_kernels").rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} <= found
    assert "hf_specdec" in found and not any(package.startswith(("kernels", "tests")) for package in found)


# ---------------------------------------------------------------------------------------------- operators and compile


def attention_arguments(**changes: Any) -> dict[str, Any]:
    ancestors = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    return {
        "query": torch.randn(2, 4, 3, 8),
        "key": torch.randn(2, 2, 20, 8),
        "value": torch.randn(2, 2, 20, 8),
        "lengths": torch.tensor([5, 9]),
        "ancestors": hf_specdec_kernels.pack_ancestors(ancestors),
        "query_depths": torch.arange(3)[None],
    } | changes


def walk_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "logits": torch.randn(2, 4, 11),
        "tokens": torch.randint(0, 11, (2, 4)),
        "parents": torch.tensor([[0, 0, 0, 1]]),
        "max_depth": 2,
    } | changes


def drawn_arguments(**changes: Any) -> dict[str, Any]:
    return walk_arguments(uniforms=torch.rand(2, 4), temperature=torch.ones(2), top_p=torch.full((2,), 0.9)) | changes


def compaction_arguments(**changes: Any) -> dict[str, Any]:
    caches = [torch.randn(2, 2, 20, 8) for _ in range(4)]
    return {
        "caches": caches,
        "pointers": hf_specdec_kernels.pointer_table(caches),
        "lengths": torch.tensor([5, 9]),
        "path": torch.tensor([[0, 2, 3], [0, 1, 3]]),
        "accepted": torch.tensor([2, -1]),
    } | changes


CALLS = {
    "tree_attention": attention_arguments,
    "greedy_walk": walk_arguments,
    "chosen_walk": lambda **changes: (
        {name: value for name, value in walk_arguments().items() if name != "logits"}
        | {"chosen": torch.randint(0, 11, (2, 4))}
        | changes
    ),
    "target_walk": drawn_arguments,
    "rejection_walk": lambda **changes: drawn_arguments(draft_logits=torch.randn(2, 4, 11)) | changes,
    "draft_tokens": lambda **changes: {"logits": torch.randn(2, 3, 11), "count": 4} | changes,
    "draw_children": lambda **changes: (
        {"logits": torch.randn(2, 3, 11), "count": 4, "seeds": torch.tensor([1, 2]), "with_best": True} | changes
    ),
    "exponential_noise": lambda **changes: (
        {"seeds": torch.tensor([1, 2]), "numbers": torch.tensor([[4, 5, 5], [0, 1, 2]]), "vocab": 11} | changes
    ),
    "filter_logits": lambda **changes: {"logits": torch.randn(2, 3, 11), "top_k": torch.tensor([4, 0])} | changes,
    "draft_overlaps": lambda **changes: (
        {"logits": torch.randn(2, 11), "draft_logits": torch.randn(2, 11), "grid": torch.tensor([0.5, 1.0])} | changes
    ),
    "share_out": lambda **changes: (
        {
            "numbers": torch.tensor([[4, 6], [5, 6]]),
            "path_log_q": -torch.rand(2, 2),
            "valid": torch.ones(2, 2, dtype=torch.bool),
            "best": -torch.rand(2, 2, 3),
            "drawn": torch.randint(0, 9, (2, 2, 3)),
            "drawn_log_q": -torch.rand(2, 2, 3),
            "budget": 4,
            "num_chosen": 2,
            "first_node": 7,
        }
        | changes
    ),
    "best_paths": lambda **changes: (
        {"tokens": torch.randint(0, 9, (2, 3, 4)), "log_q": -torch.rand(2, 3, 4), "num_nodes": 5} | changes
    ),
    "pair_lists": lambda **changes: (
        {
            "tokens": torch.randint(0, 9, (2, 3, 4)),
            "log_q": -torch.rand(2, 3, 4),
            "queries": torch.rand(2, 3, 4, 5),
            "keys": torch.rand(9, 5),
            "ranks": 3,
        }
        | changes
    ),
    "choose_nodes": lambda **changes: (
        {
            "tokens": torch.randint(0, 9, (2, 3, 4)),
            "log_q": -torch.rand(2, 3, 4),
            "path_log_q": -torch.rand(2, 3),
            "ancestors": torch.ones(2, 3, 5, dtype=torch.bool),
            "count": 3,
        }
        | changes
    ),
    "tree_ancestors": lambda **changes: {"parents": torch.tensor([[0, 0, 1], [0, 0, 0]]), "depth": 2} | changes,
    "kv_compaction": compaction_arguments,
    "merged_linear": lambda **changes: (
        {
            "input": torch.randn(2, 3, 8),
            "weights": [torch.randn(5, 8), torch.randn(4, 8)],
        }
        | changes
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.some_cases(5)
def test_operators_are_registered_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`opcheck` on the arguments that a call hands to its operator: schema, fake implementation, autograd."""
    operator = getattr(torch.ops.hf_specdec_kernels, name)
    calls = []

    class Recorder:
        def __getattr__(self, other: str) -> Any:
            return lambda *args: calls.append(args)

    module = sys.modules[getattr(hf_specdec_kernels, name).__module__]
    if hasattr(module, "run"):  # which may pass torch's dispatcher by
        monkeypatch.setattr(module, "run", lambda operator, *args: calls.append(args))
    else:
        monkeypatch.setattr(module, "ops", Recorder())
    getattr(hf_specdec_kernels, name)(**CALLS[name]())
    assert set(torch.library.opcheck(operator.default, calls[0]).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.some_cases(4)
def test_compiles_as_a_whole(name: str) -> None:
    """What `eager` takes as it is traced, `aot_eager` makes functional, too."""
    function = getattr(hf_specdec_kernels, name)
    arguments = CALLS[name]()
    torch._dynamo.reset()
    compiled = torch.compile(lambda **kwargs: function(**kwargs), backend="aot_eager", fullgraph=True)
    before = [cache.clone() for cache in arguments.get("caches", ())]
    found = compiled(**arguments)
    after = [cache.clone() for cache in arguments.get("caches", ())]
    for cache, old in zip(arguments.get("caches", ()), before, strict=True):
        cache.copy_(old)
    expected = function(**arguments)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(after, list(arguments.get("caches", ())))
    assert not before or not torch.equal(before[0], after[0])


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_the_stand_in_calls_plain_versions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the dispatcher, as tests of captured steps do, they write the same; what is watched is the operator."""
    function, arguments = getattr(hf_specdec_kernels, name), CALLS[name]()
    others = copy.deepcopy(arguments)
    expected = function(**arguments)
    pass_dispatcher_by(monkeypatch)
    torch.testing.assert_close(tree_leaves((function(**others), others)), tree_leaves((expected, arguments)))
    with ReadFromOutside() as watched:
        function(**others)
    assert any(what.startswith("hf_specdec_kernels.") for what, _ in watched.found)


# -------------------------------------------------------------------------------------------------------- bad input

BAD = {
    "`key` has shape [2, 2, 20, 7]": ("tree_attention", {"key": torch.zeros(2, 2, 20, 7)}),
    "`key` has 3 heads": ("tree_attention", {"key": torch.zeros(2, 3, 20, 8), "value": torch.zeros(2, 3, 20, 8)}),
    "`key` has dtype torch.float16": ("tree_attention", {"key": torch.zeros(2, 2, 20, 8).half()}),
    "`lengths` has dtype torch.float32": ("tree_attention", {"lengths": torch.zeros(2)}),
    "`ancestors` has shape [1, 3, 1]; it must be [1 or 2, 3, 2]": ("tree_attention", {"num_nodes": 70}),
    "`ancestors` has dtype torch.bool": ("tree_attention", {"ancestors": torch.ones(1, 3, 1, dtype=torch.bool)}),
    "`window` is 0": ("tree_attention", {"window": 0}),
    "`scale` is -0.5": ("tree_attention", {"scale": -0.5}),
    "`query_depths` is None": ("tree_attention", {"window": 4, "query_depths": None}),
    "`out` has shape [2, 3, 4, 7]": ("tree_attention", {"out": torch.zeros(2, 3, 4, 7)}),
    "`logits` has shape [2, 4]": ("greedy_walk", {"logits": torch.zeros(2, 4)}),
    "`logits` has strides (44, 11, 0)": ("greedy_walk", {"logits": torch.zeros(2, 4, 11)[..., :1].expand(2, 4, 11)}),
    "`tokens` has dtype torch.int32": ("greedy_walk", {"tokens": torch.zeros(2, 4, dtype=torch.int32)}),
    "`parents` has shape [3, 4]; it must be [1 or 2, 4]": ("greedy_walk", {"parents": torch.zeros(3, 4)}),
    "`max_depth` is -1": ("greedy_walk", {"max_depth": -1}),
    "`end_tokens` is empty": ("greedy_walk", {"end_tokens": torch.zeros(0, dtype=torch.long)}),
    "`num_nodes` is 0; it must be positive": (
        "tree_attention",
        {"num_nodes": 0, "ancestors": torch.zeros(1, 3, 0, dtype=torch.long)},
    ),
    "`uniforms` has shape [2, 3]; it must be [2, 4]": ("target_walk", {"uniforms": torch.rand(2, 3)}),
    "`temperature` has dtype torch.float64": ("target_walk", {"temperature": torch.ones(2).double()}),
    "`draft_logits` has shape [2, 4, 9]": ("rejection_walk", {"draft_logits": torch.zeros(2, 4, 9)}),
    "`out.path` is a torch.int64 tensor of shape [2, 2]": (
        "greedy_walk",
        {"out": hf_specdec_kernels.Walks(*(torch.zeros(2, 2, dtype=torch.long) for _ in range(3)))},
    ),
    "`count` is 12; it must be from 1 to 11": ("draft_tokens", {"count": 12}),
    "`chosen` has dtype torch.float32": ("chosen_walk", {"chosen": torch.zeros(2, 4)}),
    "`tokens` has shape [2, 3]; it must be [2, 4]": ("chosen_walk", {"tokens": torch.zeros(2, 3, dtype=torch.long)}),
    "`positions` has shape [2, 2]; it must be [2, 1 or 3]": ("draw_children", {"positions": torch.ones(2, 2).long()}),
    "`token_ids` has shape [9]; it must be [11]": ("draw_children", {"token_ids": torch.arange(9)}),
    "`numbers` has shape [3, 1]; it must be [2, any]": ("exponential_noise", {"numbers": torch.ones(3, 1).long()}),
    "`vocab` is 0; there must be one token": ("exponential_noise", {"vocab": 0}),
    "`seeds` has shape [3]; it must be [2]": ("draw_children", {"seeds": torch.tensor([1, 2, 3])}),
    "`num_chosen` is 5 and `budget` 4": ("share_out", {"num_chosen": 5}),
    "`num_nodes` is 0 for [3, 4] levels and ranks": ("best_paths", {"num_nodes": 0}),
    "`log_q` has shape [2, 3, 4]": ("best_paths", {"following": torch.zeros(2, 3, 4, dtype=torch.long)}),
    "`ranks` is 5; it must be from 1 to the 4 candidates": ("pair_lists", {"ranks": 5}),
    "`keys` has shape [9, 6]; it must be [any, 5]": ("pair_lists", {"keys": torch.rand(9, 6)}),
    "`count` is 13; it must be from 1 to 12": ("choose_nodes", {"count": 13}),
    "`parents` has dtype torch.int32": ("tree_ancestors", {"parents": torch.zeros(2, 3, dtype=torch.int32)}),
    "`draft_logits` has shape [2, 7]; it must be [2, 11]": ("draft_overlaps", {"draft_logits": torch.rand(2, 7)}),
    "`weights` has 0 tensors; pass 1 to 3": ("merged_linear", {"weights": []}),
    "`weights[1]` has shape [4, 7]; it must be [any, 8]": (
        "merged_linear",
        {"weights": [torch.zeros(5, 8), torch.zeros(4, 7)]},
    ),
    "`weights[0]` has dtype torch.float16": ("merged_linear", {"weights": [torch.zeros(5, 8).half()]}),
    "`input` has no dimensions": ("merged_linear", {"input": torch.zeros(())}),
    "`caches` is empty": ("kv_compaction", {"caches": []}),
    "`caches[1]` is a torch.float64 tensor": (
        "kv_compaction",
        {"caches": [torch.zeros(2, 2, 20, 8), torch.zeros(2, 2, 20, 8).double()]},
    ),
    "`pointers` has shape [3]; it must be [4]": ("kv_compaction", {"pointers": torch.zeros(3, dtype=torch.long)}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message: str) -> None:
    name, changes = BAD[message]
    with pytest.raises((ValueError, TypeError)) as caught:
        getattr(hf_specdec_kernels, name)(**CALLS[name](**changes))
    assert message in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- the build


# (A folder of that name on the path can be imported, too.)
@pytest.mark.skipif("kernels" not in packages_distributions(), reason="the package `kernels` is not installed")
def test_a_build_can_be_loaded(tmp_path: Path) -> None:
    import kernels

    spec = importlib.util.spec_from_file_location("build_of_kernel", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    variant = tmp_path / "build" / "torch-universal"
    module.build(variant)
    loaded = kernels.get_local_kernel(tmp_path)
    assert sorted(loaded.__all__) == sorted(hf_specdec_kernels.__all__)
    assert loaded.__file__.startswith(str(tmp_path))
    arguments = attention_arguments()
    expected = hf_specdec_kernels.tree_attention(**arguments)
    assert torch.equal(loaded.tree_attention(**arguments), expected)
    identifier = json.loads((variant / "metadata.json").read_text())["id"]
    assert hasattr(getattr(torch.ops, identifier), "tree_attention")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_triton_against_plain_pytorch(chosen: str) -> None:
    """The kernels' own tests, in a process of their own: Triton has to be told before its import to interpret."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, FOLDER / "tests"]
    done = run(*command, OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
