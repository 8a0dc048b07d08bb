"""The paths by which users import: each alone, in a process that has imported nothing else of the library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fresh import run_python
from support.pages import CARDS, PAGES, ROOT, blocks

import hf_specdec


NAMES = {
    "hf_specdec": (
        "BlockConfig",
        "BlockHead",
        "DraftRequest",
        "DraftTree",
        "Drafter",
        "DynamicTree",
        "EagleConfig",
        "EagleHead",
        "Measurement",
        "GemmaAssistant",
        "GemmaAssistantConfig",
        "MedusaConfig",
        "MedusaHeads",
        "MtpConfig",
        "MtpHead",
        "NgramDraft",
        "OnlineHead",
        "SpeculationMetrics",
        "SpeculativeConfig",
        "SpeculativeGenerateOutput",
        "TokenTree",
        "Topology",
        "last_metrics",
        "load_draft",
        "rollouts",
    ),
    "hf_specdec.benchmarking": ("bench", "contenders", "prompts"),
    "hf_specdec.benchmarking.contenders": ("sampling_options",),
    "hf_specdec.benchmarking.prompts": ("encode_turns",),
    "hf_specdec.checkpoints.keys": ("Keys",),
    "hf_specdec.checkpoints.published": ("section",),
    "hf_specdec.checkpoints.reading": ("Checkpoint",),
    "hf_specdec.drafters": ("ObservedDrafter", "as_drafter"),
    "hf_specdec.eagle": ("formats",),
    "hf_specdec.eagle.formats.safeailab": ("read_either",),
    "hf_specdec.engine.request": ("RequestOptions",),
    "hf_specdec.loading": ("DTYPES", "default_device", "load_draft_to", "load_target", "load_tokenizer"),
    "hf_specdec.bulk": ("answering",),
    "hf_specdec.replicas": ("ReplicaOptions", "application"),
    "hf_specdec.serving.engine": ("EngineOptions",),
    "hf_specdec.serving.errors": ("RequestRefused",),
    "hf_specdec.serving.text_pieces": ("TextPieces",),
    "hf_specdec.smollm2": ("SMOLLM2_HUB_ID", "smollm2_folder"),
    "hf_specdec.states": ("NodeTopology", "Path", "Recurrence"),
    "hf_specdec.training": ("TrainOptions", "train"),
    "hf_specdec.trees.text": ("parse_tree",),
    "hf_specdec.verification": ("Verifier",),
    "hf_specdec.verification.walk": ("Walk",),
    "hf_specdec_kernels": (
        "DeltaPending",
        "PendingPath",
        "commit_delta_rule",
        "kv_compaction",
        "pack_ancestors",
        "pointer_table",
        "rejection_walk",
        "tree_attention",
        "tree_delta_rule",
    ),
}
"""What the package promises, and what README, docs, examples and cards import. Who renames one breaks users' code."""
PATHS = [(module, name) for module, names in NAMES.items() for name in names]
SOURCES = [*PAGES, *CARDS, *(path for folder in ("examples", "model_cards") for path in (ROOT / folder).rglob("*.py"))]


def imports_of(source: Path) -> Iterator[tuple[str, str]]:
    """Modules and names that the Python of a page or a script imports from the library; "" for a module itself."""
    codes = [source.read_text()] if source.suffix == ".py" else [code for _, code in blocks(source, "python")]
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found = [(node.module or "", name.name) for name in node.names]
        else:
            found = [(name.name, "") for name in node.names] if isinstance(node, ast.Import) else []
        yield from (one for one in found if one[0].partition(".")[0] in ("hf_specdec", "hf_specdec_kernels"))


def test_the_list_is_complete() -> None:
    """It has what is promised and what the sources import, and nothing else."""
    found = {one for source in SOURCES for one in imports_of(source)} - {("hf_specdec", "")}
    promised = {("hf_specdec", name) for name in hf_specdec.__all__}
    assert found | promised == set(PATHS)


ALONE = [
    *(("hf_specdec", name) for name in NAMES["hf_specdec"]),  # which it imports when they are asked for
    *((module, ", ".join(names)) for module, names in NAMES.items() if module != "hf_specdec"),
]


@pytest.mark.parametrize("module, names", ALONE, ids=map(" ".join, ALONE))
def test_a_path_alone(module: str, names: str) -> None:
    run_python(f"from {module} import {names}")
