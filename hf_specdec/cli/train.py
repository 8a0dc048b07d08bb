"""`hf-specdec train`: trains an EAGLE head, a block head or a small draft model for a target."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .options import TargetOption


_DATA = "Data (one of them)"
_MODEL = "What is trained"
_BLOCK = "Heads that draft blocks (dflash, dspark)"
_RUN = "The run"


def train(
    output: Annotated[str, typer.Option(help="Folder of the result. Given again, it is continued.")],
    kind: Annotated[
        str,
        typer.Option(
            help="eagle3, eagle1, dflash, dspark (which draft blocks), or draft (a small language model).",
            rich_help_panel=_MODEL,
        ),
    ] = "eagle3",
    target: TargetOption = None,
    self_generate: Annotated[
        int | None,
        typer.Option(help="Number of conversations of which the target writes both sides.", rich_help_panel=_DATA),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="File (.txt with a question per line, or .jsonl) or data set whose questions the target answers.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help='File (.jsonl with "messages", "conversations" or "text"; .json; .txt), or a name for `datasets`.',
            rich_help_panel=_DATA,
        ),
    ] = None,
    data_split: Annotated[str, typer.Option(help="Split of a data set.", rich_help_panel=_DATA)] = "train",
    data_limit: Annotated[
        int | None, typer.Option(help="The first so many records only.", rich_help_panel=_DATA)
    ] = None,
    strict_data: Annotated[
        bool,
        typer.Option(
            "--strict-data", help="Stop at a bad record instead of skipping it with a warning.", rich_help_panel=_DATA
        ),
    ] = False,
    openings: Annotated[
        str | None,
        typer.Option(
            help="File of beginnings of questions, one per line; they may have a {subject}.", rich_help_panel=_DATA
        ),
    ] = None,
    subjects: Annotated[
        str | None, typer.Option(help="File of what fills {subject}, one per line.", rich_help_panel=_DATA)
    ] = None,
    openings_share: Annotated[
        float, typer.Option(help="Share of the written conversations that begin so.", rich_help_panel=_DATA)
    ] = 0.5,
    greedy_share: Annotated[
        float, typer.Option(help="Share of the written answers at temperature 0.", rich_help_panel=_DATA)
    ] = 0.3,
    cool_share: Annotated[
        float, typer.Option(help="The same at temperature 0.3; others are at 0.6 to 1.", rich_help_panel=_DATA)
    ] = 0.2,
    write_seconds: Annotated[
        float | None,
        typer.Option(help="After so long the target begins no more conversations.", rich_help_panel=_DATA),
    ] = None,
    turns: Annotated[int, typer.Option(help="Most questions of a written conversation.", rich_help_panel=_DATA)] = 1,
    loss_on_everything: Annotated[
        bool, typer.Option("--loss-on-everything", help="Learn from questions too.", rich_help_panel=_DATA)
    ] = False,
    max_length: Annotated[
        int, typer.Option(help="Most tokens of a text; tokens of a packed row.", rich_help_panel=_DATA)
    ] = 1024,
    eval_texts: Annotated[int, typer.Option(help="Held-out texts.", rich_help_panel=_DATA)] = 64,
    generation_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Rows in which the target writes. Default: up to 2048 on CUDA, 16 on a CPU.", rich_help_panel=_DATA
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            help="Hub id or folder of a head (or draft model) to train further; it decides the sizes.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens a head can propose; 0: all. Default: 8192, 32000 of a large vocabulary; block heads: all.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    shares_lm_head: Annotated[
        bool,
        typer.Option(
            "--shares-lm-head",
            help="Use the target's lm_head for a draft vocabulary; it is neither trained nor stored.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    num_layers: Annotated[
        int | None,
        typer.Option(
            help="Default: 1 for EAGLE heads, 5 for block heads, 2 for draft models.", rich_help_panel=_MODEL
        ),
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Of a draft model.", rich_help_panel=_MODEL)] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the MLP. Default: the target's.", rich_help_panel=_MODEL)
    ] = None,
    aux_layer_ids: Annotated[
        str | None,
        typer.Option(
            help="Hidden states that a head reads, such as 2,15,27: after so many layers.", rich_help_panel=_MODEL
        ),
    ] = None,
    unroll_steps: Annotated[int, typer.Option(help="Unrolled steps of EAGLE-3.", rich_help_panel=_MODEL)] = 7,
    decay: Annotated[
        float, typer.Option(help="Weight of an unrolled step relative to the one before.", rich_help_panel=_MODEL)
    ] = 0.8,
    block_size: Annotated[
        int | None,
        typer.Option(help="Rows of a block: dflash 16 (15 drafts), dspark 7 (7 drafts).", rich_help_panel=_BLOCK),
    ] = None,
    num_anchors: Annotated[
        int, typer.Option(help="Most blocks of a row of texts in a forward.", rich_help_panel=_BLOCK)
    ] = 512,
    gamma: Annotated[
        float | None,
        typer.Option(help="Draft k weighs exp(-(k - 1) / gamma). Default: 4, 7 for 16 rows.", rich_help_panel=_BLOCK),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Block rows see no later rows, as in JetSpec.", rich_help_panel=_BLOCK)
    ] = False,
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            help="Token that stands for unknown ones. Default: one that the texts do not use.", rich_help_panel=_BLOCK
        ),
    ] = None,
    markov_rank: Annotated[
        int | None, typer.Option(help="Of the Markov head of dspark. Default: 64.", rich_help_panel=_BLOCK)
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option(help="Attention heads. Default: the target's.", rich_help_panel=_BLOCK)
    ] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Default: the target's.", rich_help_panel=_BLOCK)] = None,
    loss_weights: Annotated[
        str | None,
        typer.Option(
            help="Such as divergence=1,distance=0.5,confidence=1. Default: cross_entropy=1 for dflash, "
            "cross_entropy=0.1,distance=0.9,confidence=1 for dspark.",
            rich_help_panel=_BLOCK,
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(help="adamw, or muon for matrices of layers and adamw for the rest.", rich_help_panel=_RUN),
    ] = "adamw",
    epochs: Annotated[float, typer.Option(help="Passes over the data.", rich_help_panel=_RUN)] = 3.0,
    learning_rate: Annotated[
        float | None, typer.Option(help="Default: by the width of the model.", rich_help_panel=_RUN)
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of an optimizer step, over all processes. Default: 16384, fewer if the data is little.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    rows_at_once: Annotated[
        int | None, typer.Option(help="Rows of a forward on one device.", rich_help_panel=_RUN)
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Compute attention scores twice, for less memory.", rich_help_panel=_RUN),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the target. Default: bfloat16 on a GPU, else float32.", rich_help_panel=_RUN),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave a GPU unused.", rich_help_panel=_RUN)] = False,
    seed: Annotated[int, typer.Option(help="Of weights, order and writing.", rich_help_panel=_RUN)] = 0,
    save_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.", rich_help_panel=_RUN)] = 5.0,
    eval_steps: Annotated[
        int | None, typer.Option(help="Steps between evaluations. Default: a tenth of the run.", rich_help_panel=_RUN)
    ] = None,
    logging_steps: Annotated[int, typer.Option(help="Steps between log lines.", rich_help_panel=_RUN)] = 10,
    max_seconds: Annotated[
        float | None,
        typer.Option(help="Stop after so long with a checkpoint; the same command continues.", rich_help_panel=_RUN),
    ] = None,
    progress: Annotated[bool, typer.Option(help="Progress bars.", rich_help_panel=_RUN)] = True,
) -> None:
    """
    Train an EAGLE head, a head that drafts blocks, or a small draft model, for a target.

    Over several GPUs: accelerate launch --module hf_specdec.cli train …
    """
    options = dict(locals())
    from ..training import TrainOptions, end_processes
    from ..training import train as run
    from ..training.options import LOADERS

    console = Console(soft_wrap=True)
    try:
        if aux_layer_ids is not None:
            options["aux_layer_ids"] = _parse_ids(aux_layer_ids)
        result = run(TrainOptions(**options), report=console.print)
    except (ImportError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    end_processes()
    if os.environ.get("RANK", "0") != "0":  # only rank 0 prints
        return
    if not result.finished:
        where = f"at step {result.step} of {result.total_steps}" if result.total_steps else "while the target wrote"
        console.print(f"Stopped {where}; the same command continues.")
        return
    console.print(_table(result.before, result.after))
    console.print(f"{LOADERS[kind]}.from_pretrained({str(result.output)!r})", highlight=False)


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"`--aux-layer-ids {text}`: give numbers with commas, such as 2,15,27.") from error


def _table(before: dict[str, float], after: dict[str, float]) -> Table:
    table = Table("held-out texts", "before", "after", box=None)
    names = ["loss", "acceptance_length", *(name[5:] for name in after if name.startswith("eval_top1_"))]
    for name in names:
        values = (values.get(f"eval_{name}") for values in (before, after))
        table.add_row(
            "simulated acceptance length" if name == "acceptance_length" else name.replace("top1_", "top-1, depth "),
            *("" if value is None else f"{value:.3f}" for value in values),
        )
    return table
