"""Trains in every process, and says what it ended with: run by `test_processes.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from support.goldens import TINY_TARGET
from support.ranks import write_result

from hf_specdec.training import TrainOptions, end_processes, train, trainer


def main(folder: Path) -> None:
    weights: list[torch.Tensor] = []
    ends_training = trainer.DraftTrainer.train

    def watched(self: trainer.DraftTrainer, **options: object) -> object:
        result = ends_training(self, **options)
        model = self.accelerator.unwrap_model(self.model)
        weights.append(torch.cat([one.detach().flatten() for one in model.parameters() if one.requires_grad]))
        return result

    trainer.DraftTrainer.train = watched
    options = TrainOptions(
        output=str(folder / "out"),
        target=str(TINY_TARGET),
        data=str(folder / "texts.jsonl"),
        eval_texts=4,
        epochs=2.0,
        max_length=64,
        batch_tokens=256,
        cpu=True,
        progress=False,
        **json.loads((folder / "options.json").read_text()),
    )
    result = train(options)
    write_result(
        folder,
        {
            "sum": weights[0].double().sum().item(),
            "weights": weights[0][::97],
            "steps": result.step,
            "before": result.before,
            "after": result.after,
        },
    )
    end_processes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
