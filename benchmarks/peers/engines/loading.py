"""Targets for the contenders that are built on transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..job import Job


def load(name: str, job: Job, is_random: bool = False) -> Any:
    """A model of a Hub id or folder, in the job's dtype on its device, whose texts no end token ends."""
    torch.manual_seed(0)
    dtype = getattr(torch, job.dtype)
    if is_random:
        with torch.device(job.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(job.device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def sampling(temperature: float) -> dict[str, Any]:
    """The options of `generate` for a temperature, whatever the model's own are."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}


def padded(prompts: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    """The inputs of `generate` for prompts, padded on the left."""
    length = max(map(len, prompts))
    ids = [[0] * (length - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
