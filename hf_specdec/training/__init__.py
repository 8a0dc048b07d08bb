"""
Training of EAGLE heads, block heads (DFlash, DSpark) and small draft models for a target, on transformers'
`Trainer`.

```python
from hf_specdec.training import TrainOptions, train

train(TrainOptions(output="head", target="HuggingFaceTB/SmolLM2-135M-Instruct", self_generate=20000))
```
"""

from .options import TrainOptions
from .recipe import TrainResult, end_processes, train


__all__ = ["TrainOptions", "TrainResult", "end_processes", "train"]
