"""The contenders: how each is started, and what it needs. Standard library only, as job.py."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .job import Engine, Job


ONE_AT_A_TIME = "it serves one request at a time"


@dataclass(frozen=True)
class Contender:
    """
    One contender.

    Args:
        family (`str`): whose it is; the module of `peers.engines` that runs it.
        way (`str`): what the module is told.
        label (`str`): name in tables.
        head (`str`, *optional*): format of the head that it reads.
        needs_assistant (`bool`): whether it needs a small language model.
        holds_length (`bool`): whether a set number of tokens per step can be had, or none are drafted.
        serves_several (`bool`): whether several requests can be open.
    """

    family: str
    way: str
    label: str
    head: str | None = None
    needs_assistant: bool = False
    holds_length: bool = True
    serves_several: bool = True

    def serves(self, number: int) -> bool:
        """Whether so many requests can be open; cells that cannot be are not tried."""
        return self.serves_several or number == 1

    def start(self, name: str, job: Job) -> Engine:
        """Loads the engine in this process."""
        return import_module(f"peers.engines.{self.family}").start(self.way, job, job.arguments.get(name, {}))

    def reason_against(self, job: Job) -> str | None:
        """Why the contender cannot take part in the job; None if it can."""
        if job.is_random and not self.holds_length:
            return "it has no switch for a fixed acceptance, and random weights accept nothing"
        if not any(map(self.serves, job.open)):
            return ONE_AT_A_TIME
        if self.needs_assistant and job.assistant is None:
            return "it needs a small language model: --assistant FOLDER"
        if self.family == "eagle" and job.eagle_code is None:
            return "it needs a checkout of SafeAILab/EAGLE: --eagle-code FOLDER"
        return None


PACKAGES = {
    "ours": "hf_specdec",
    "hf": "transformers",
    "vllm_engine": "vllm",
    "sglang_engine": "sglang",
    "eagle": "transformers",
}
"""The package that a family's environment must have."""

ALONE = {"holds_length": False, "serves_several": False}

CONTENDERS = {
    "hf-plain": Contender("hf", "plain", "transformers, generate"),
    "hf-static": Contender("hf", "static", "transformers, static cache"),
    "hf-assisted": Contender("hf", "assisted", "transformers, assisted", needs_assistant=True, **ALONE),
    "hf-assisted-static": Contender(
        "hf", "assisted-static", "transformers, assisted, static cache", needs_assistant=True, **ALONE
    ),
    "hf-lookup": Contender("hf", "lookup", "transformers, prompt lookup", **ALONE),
    "hf-mtp": Contender("hf", "mtp", "transformers, own MTP", **ALONE),
    "hf-batching": Contender("hf", "batching", "transformers, continuous batching"),
    "vllm-plain": Contender("vllm_engine", "plain", "vLLM, plain"),
    "vllm-chain": Contender("vllm_engine", "chain", "vLLM, chain", head="specforge"),
    "sglang-plain": Contender("sglang_engine", "plain", "SGLang, plain"),
    "sglang-chain": Contender("sglang_engine", "chain", "SGLang, chain", head="specforge"),
    "sglang-tree": Contender("sglang_engine", "tree", "SGLang, tree", head="specforge"),
    "eagle-tree": Contender("eagle", "tree", "SafeAILab EAGLE, tree", head="safeailab", **ALONE),
    "ours-plain": Contender("ours", "plain", "hf_specdec, plain steps", head="hf_specdec"),
    "ours-chain": Contender("ours", "chain", "hf_specdec, chain", head="hf_specdec"),
    "ours-tree": Contender("ours", "tree", "hf_specdec, tree", head="hf_specdec"),
    "ours-auto": Contender("ours", "auto", "hf_specdec, auto", head="hf_specdec", holds_length=False),
}
