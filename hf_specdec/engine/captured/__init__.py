"""
Captured steps: whole steps of requests, be they the rows of a `generate` call or in flight, each the replay of one
CUDA graph. A graph has the draft's catching up and its trees, the target's forward, the walk and the commit; the host
loads the rows and reads the report.

- `keys`: kinds and sizes of steps, which are fixed at a capture; `kinds`: which kind rows need.
- `rows`: the inputs of a captured step, per row; `staged_rows`: how the host loads them; `row_buffer`: their memory;
  `values`: what they are loaded with.
- `walks`: verification of the rows, each in its own way; `verdicts`: one way; `drawing`: what children are drawn from.
- `processing`: what rows' processors do with the logits of target and draft; `nodes`: at which nodes; `biases`,
  `text_processors`: some of them.
- `grammars`: tokens that grammars ask for, or do not allow.
- `log_probabilities`: those of new tokens.
- `captured`: the base class of captured steps.
- `step`: a decoding step, captured once per size and replayed for any requests.
- `prompt_step`: a captured prefill step; `prompts`: which of them are captured, and run prefill chunks.
- `parts`: the parts of a step; `outcome`: what comes of them.
- `stored`: the captured steps that there are, and which of them runs rows of a kind and size.
- `reports`: reading what a step reports while its next run is on its way.
- `ahead`: captures before requests come.
- `device_steps`: which steps are captured, and when; `running`: running them, again before the host has
  read the last run.
"""

from .device_steps import DeviceSteps
from .outcome import Outcome
from .parts import DraftGroup
from .prompt_step import LaunchedPrompts
from .running import StepRunner


__all__ = ["DeviceSteps", "DraftGroup", "LaunchedPrompts", "Outcome", "StepRunner"]
