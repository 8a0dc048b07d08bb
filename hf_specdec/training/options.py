"""Options of a training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ..loading import DTYPES
from .loss_weights import LossWeights


LOADERS = {
    "eagle3": "hf_specdec.EagleHead",
    "eagle1": "hf_specdec.EagleHead",
    "draft": "AutoModelForCausalLM",
    "dflash": "hf_specdec.BlockHead",
    "dspark": "hf_specdec.BlockHead",
}
"""The kinds of what is trained, with the class that loads it."""
OPTIMIZERS = ("adamw", "muon")

# Runs into one folder must agree on these options: checkpoints and the order of the data depend on them.
_IDENTITY = (
    "kind target data data_split data_limit prompts self_generate openings subjects openings_share greedy_share "
    "cool_share turns max_length eval_texts "
    "loss_on_everything draft_vocab_size shares_lm_head num_layers hidden_size intermediate_size aux_layer_ids "
    "start_from unroll_steps decay block_size num_anchors gamma causal mask_token_id markov_rank num_heads "
    "num_kv_heads loss_weights optimizer epochs learning_rate batch_tokens seed"
).split()
# Options that do nothing with other kinds, or other sources of texts.
_OF_KINDS = {
    ("eagle3",): "decay recompute".split(),
    ("eagle3", "dflash", "dspark"): "draft_vocab_size shares_lm_head aux_layer_ids".split(),
    ("eagle3", "eagle1", "draft"): ["unroll_steps"],
    ("dflash", "dspark"): (
        "block_size num_anchors gamma causal mask_token_id num_heads num_kv_heads loss_weights".split()
    ),
    ("dspark",): ["markov_rank"],
}
_OF_SOURCES = {
    ("data", "prompts"): "data_split data_limit strict_data".split(),
    ("prompts", "self_generate"): "greedy_share cool_share write_seconds generation_batch_size".split(),
    ("self_generate",): "openings openings_share turns".split(),
}
_SIZES = (
    "draft_vocab_size shares_lm_head num_layers hidden_size intermediate_size aux_layer_ids block_size causal "
    "mask_token_id markov_rank num_heads num_kv_heads"
).split()


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """
    Options of `train`. Exactly one of `data`, `prompts` and `self_generate` gives the texts.

    Args:
        output (`str`): folder of the result, with data and checkpoints below it. A run into an existing folder
            continues the run there.
        kind (`str`, *optional*, defaults to `"eagle3"`): "eagle3", "eagle1", "dflash" or "dspark", heads that draft
            blocks, or "draft", a small language model.
        target (`str`, *optional*): Hub id or folder. Defaults to SmolLM2-135M-Instruct from the package.
        data (`str`, *optional*): file of conversations or texts, or a name for `datasets` (see `read_records`).
        data_split (`str`, *optional*, defaults to `"train"`): split of a `datasets` data set.
        data_limit (`int`, *optional*): largest number of records (or prompts) to read.
        strict_data (`bool`, *optional*, defaults to `False`): stop at the first bad record of `data` or `prompts`;
            else it is skipped with a warning.
        prompts (`str`, *optional*): file or data set, in the formats of `data`; the target answers the last question
            of each record.
        self_generate (`int`, *optional*): number of conversations of which the target writes both sides.
        openings (`str`, *optional*): file of beginnings of questions, one per line (`\\n` for a new line; lines with a
            # in front are comments). Conversations take them in turn; without a file the target chooses all subjects.
        subjects (`str`, *optional*): file of subjects that fill a `{subject}` in an opening, one per line, see
            `Openings`.
        openings_share (`float`, *optional*, defaults to 0.5): share of the conversations that begin with an opening.
        greedy_share (`float`, *optional*, defaults to 0.3): share of the written answers at temperature 0.
        cool_share (`float`, *optional*, defaults to 0.2): share of the written answers at temperature 0.3; the other
            answers have temperatures from 0.6 to 1.
        write_seconds (`float`, *optional*): seconds after which the target begins no more conversations;
            `self_generate` (or the number of prompts) is then an upper limit.
        turns (`int`, *optional*, defaults to 1): most questions of a `self_generate` conversation.
        max_length (`int`, *optional*, defaults to 1024): most tokens of a text, and tokens of a packed row.
        generation_batch_size (`int`, *optional*): rows in which the target writes; defaults to at most 2048 on CUDA,
            as the free memory allows, 16 on a CPU, and 256 on other devices.
        eval_texts (`int`, *optional*, defaults to 64): number of held-out texts, at most half of all. A text longer
            than `max_length` is held out with all its pieces, which count as texts.
        loss_on_everything (`bool`, *optional*, defaults to `False`): whether questions are under the loss mask too.
        start_from (`str`, *optional*): Hub id or folder of a head or draft model with the initial weights; it also
            determines the sizes.
        draft_vocab_size (`int`, *optional*): EAGLE-3: tokens that the head can propose. Defaults to 8192 (32000 for
            vocabularies of 65536 tokens or more), or all tokens of a smaller vocabulary; 0 for all tokens. Block heads
            propose all tokens by default.
        shares_lm_head (`bool`, *optional*, defaults to `False`): the head uses the rows of its draft vocabulary of the
            target's lm_head, which are then not stored, and in EAGLE-3 not trained. (Block heads never train them, and
            without a draft vocabulary have none of their own.)
        num_layers (`int`, *optional*): decoder layers; defaults to 1 for EAGLE heads, 2 for draft models, and 5 for
            block heads.
        hidden_size (`int`, *optional*): width of a draft model; a head has the target's.
        intermediate_size (`int`, *optional*): width of the MLP.
        aux_layer_ids (`tuple[int, ...]`, *optional*): boundaries to read, see `new_head_config` and
            `new_block_config`.
        unroll_steps (`int`, *optional*, defaults to 7): K, unrolled steps of EAGLE-3; depths counted for EAGLE-1 and
            draft models.
        decay (`float`, *optional*, defaults to 0.8): weight of an unrolled step relative to the previous one.
        block_size (`int`, *optional*): B, rows of a block: of DFlash the newest token and B - 1 drafts, by default 16;
            of DSpark B drafts, by default 7.
        num_anchors (`int`, *optional*, defaults to 512): block heads: most blocks of a row of texts in a forward.
        gamma (`float`, *optional*): block heads: draft k weighs exp(-(k - 1) / gamma); see `default_gamma`.
        causal (`bool`, *optional*, defaults to `False`): block heads: whether block rows see no later rows.
        mask_token_id (`int`, *optional*): block heads: the token whose embedding stands for unknown tokens. Defaults
            to one that the texts do not use, see `choose_mask_token`.
        markov_rank (`int`, *optional*): DSpark: rank of the Markov head, of twice as many parameters as the
            vocabulary times this; defaults to 64.
        num_heads, num_kv_heads (`int`, *optional*): block heads: attention heads; default to the target's.
        loss_weights (`str`, *optional*): block heads: what is summed for a predicted token, such as
            "divergence=1,distance=0.5,confidence=1", see `LossWeights`; defaults to those of the kind's publication.
        optimizer (`str`, *optional*, defaults to `"adamw"`): "adamw", or "muon" for the matrices of the layers with
            AdamW for all else, see `MuonAndAdamW`.
        epochs (`float`, *optional*, defaults to 3.0): passes over the data.
        learning_rate (`float`, *optional*): defaults to 0.7 / H for EAGLE-3 (1.2e-3 for H = 576, 1.7e-4 for 4096),
            0.12 / H for EAGLE-1, and 0.5 / H for draft models, at most 2e-3; for block heads as for EAGLE-3, but at
            least 6e-4.
        batch_tokens (`int`, *optional*): tokens of an optimizer step, over all processes. Defaults to 16384, or
            less, for 100 steps from little data.
        rows_at_once (`int`, *optional*): rows of a forward on one device; gradients are accumulated over several
            forwards. Defaults to rows of 8192 tokens together on a GPU, 2048 elsewhere.
        seed (`int`, *optional*, defaults to 0): seed of weights, data order and the target's texts.
        dtype (`str`, *optional*): dtype of the target; defaults to bfloat16 on a GPU, float32 elsewhere.
        cpu (`bool`, *optional*, defaults to `False`): train on the CPU even if there is a GPU.
        recompute (`bool`, *optional*, defaults to `False`): saves memory at the cost of time, see `unroll`.
        save_minutes (`float`, *optional*, defaults to 5.0): minutes between checkpoints.
        eval_steps (`int`, *optional*): steps between evaluations; defaults to a tenth of the run.
        logging_steps (`int`, *optional*, defaults to 10): steps between log lines.
        max_seconds (`float`, *optional*): seconds after which the run stops with a checkpoint, to be continued later.
        progress (`bool`, *optional*, defaults to `True`): whether to show progress bars.

    Raises:
        ValueError: for invalid values and combinations, naming them.
    """

    output: str
    kind: str = "eagle3"
    target: str | None = None
    data: str | None = None
    data_split: str = "train"
    data_limit: int | None = None
    strict_data: bool = False
    prompts: str | None = None
    self_generate: int | None = None
    openings: str | None = None
    subjects: str | None = None
    openings_share: float = 0.5
    greedy_share: float = 0.3
    cool_share: float = 0.2
    write_seconds: float | None = None
    turns: int = 1
    max_length: int = 1024
    generation_batch_size: int | None = None
    eval_texts: int = 64
    loss_on_everything: bool = False
    start_from: str | None = None
    draft_vocab_size: int | None = None
    shares_lm_head: bool = False
    num_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    unroll_steps: int = 7
    decay: float = 0.8
    block_size: int | None = None
    num_anchors: int = 512
    gamma: float | None = None
    causal: bool = False
    mask_token_id: int | None = None
    markov_rank: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    loss_weights: str | None = None
    optimizer: str = "adamw"
    epochs: float = 3.0
    learning_rate: float | None = None
    batch_tokens: int | None = None
    rows_at_once: int | None = None
    seed: int = 0
    dtype: str | None = None
    cpu: bool = False
    recompute: bool = False
    save_minutes: float = 5.0
    eval_steps: int | None = None
    logging_steps: int = 10
    max_seconds: float | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        if self.kind not in LOADERS:
            raise ValueError(f"`kind`={self.kind!r} is not one of {', '.join(map(repr, LOADERS))}.")
        given = [name for name in ("data", "prompts", "self_generate") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"Give one of `data`, `prompts` and `self_generate`, the number of texts that the target is to write; "
                f"there {'is ' + ' and '.join(f'`{name}`' for name in given) if given else 'is none of them'}."
            )
        if self.subjects is not None and self.openings is None:
            raise ValueError(f"`subjects`={self.subjects!r} fills places in `openings`: give that, too.")
        for name in (
            "data_limit self_generate turns max_length generation_batch_size num_layers hidden_size intermediate_size "
            "unroll_steps epochs learning_rate batch_tokens rows_at_once eval_steps logging_steps save_minutes "
            "max_seconds write_seconds decay block_size num_anchors gamma markov_rank num_heads num_kv_heads"
        ).split():
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"`{name}`={value!r} must be more than 0.")
        if self.eval_texts < 0 or (self.draft_vocab_size or 0) < 0 or (self.mask_token_id or 0) < 0:
            raise ValueError("`eval_texts`, `draft_vocab_size` and `mask_token_id` must not be negative.")
        if self.max_length < 16:
            raise ValueError(f"`max_length`={self.max_length}: texts of less than 16 tokens teach nothing.")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"`optimizer`={self.optimizer!r} is not one of {', '.join(map(repr, OPTIMIZERS))}.")
        if self.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
            raise ValueError("`optimizer`='muon' needs torch 2.9 or newer: update torch, or use 'adamw'.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"`dtype`={self.dtype!r} is not one of {', '.join(map(repr, DTYPES))}.")
        self._check_shares()
        self._check_source(given[0])
        self._check_kind()

    def _check_shares(self) -> None:
        for name in ("openings_share", "greedy_share", "cool_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"`{name}`={getattr(self, name)!r} is a share: choose 0 … 1.")
        if self.greedy_share + self.cool_share > 1.0:
            raise ValueError(
                f"`greedy_share`={self.greedy_share} and `cool_share`={self.cool_share} are more than all answers "
                "together. Choose smaller ones."
            )

    def _check_source(self, given: str) -> None:
        for sources, names in _OF_SOURCES.items():
            changed = [name for name in names if self._is_changed(name)]
            if given not in sources and changed:
                raise ValueError(
                    f"`{changed[0]}`={getattr(self, changed[0])!r} is for "
                    f"{' and '.join(f'`{source}`' for source in sources)} alone, not for `{given}`. Leave it out."
                )

    def _is_changed(self, name: str) -> bool:
        return getattr(self, name) != getattr(type(self), name)

    def _check_kind(self) -> None:
        if self.kind != "draft" and self.hidden_size is not None:
            raise ValueError(
                f"`hidden_size`={self.hidden_size}: a head is as wide as its target, whose embeddings it reads. Leave "
                "it out, or choose `kind='draft'`."
            )
        for kinds, names in _OF_KINDS.items():
            changed = [name for name in names if self._is_changed(name)]
            if self.kind not in kinds and changed:
                raise ValueError(
                    f"`{changed[0]}` is for {' and '.join(f'`kind={kind!r}`' for kind in kinds)} alone, not for "
                    f"{self.kind!r}. Leave it out."
                )
        for name in _SIZES if self.start_from is not None else ():
            if getattr(self, name) not in (None, False):
                raise ValueError(f"`{name}` is what `start_from`={self.start_from!r} has: leave it out.")
        self._check_blocks()

    def _check_blocks(self) -> None:
        if self.loss_weights is not None and LossWeights.parse(self.loss_weights).confidence and self.kind != "dspark":
            raise ValueError(
                f"`loss_weights`={self.loss_weights!r}: heads of `kind={self.kind!r}` have no confidence to train. "
                "Leave it out, or use `kind='dspark'`."
            )
        if self.block_size is not None and not 2 <= self.block_size < self.max_length:
            raise ValueError(
                f"`block_size`={self.block_size}: choose 2 … {self.max_length - 1}. A block of one row has no masks, "
                "and drafts nothing in parallel; one of `max_length` fits into no text."
            )
        if self.kind in ("dflash", "dspark") and self.shares_lm_head and not self.draft_vocab_size:
            raise ValueError(
                f"`shares_lm_head`: without `draft_vocab_size`, a head of `kind={self.kind!r}` uses the target's "
                "lm_head in any case. Leave it out."
            )

    def identity(self) -> dict[str, Any]:
        """The options that runs into one folder must have in common, by name, as JSON stores them."""
        values = asdict(self)
        return {name: list(v) if isinstance(v := values[name], tuple) else v for name in _IDENTITY}

    @classmethod
    def default_identity(cls) -> dict[str, Any]:
        """The defaults of the options in `identity`."""
        defaults = {option.name: option.default for option in fields(cls)}
        return {name: defaults[name] for name in _IDENTITY}
