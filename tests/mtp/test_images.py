"""The MTP module of an image-text checkpoint, after prompts that hold an image."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import limits
from support.image_states import inputs_of, model_of

from hf_specdec import MtpHead, TokenTree, last_metrics


CALL = {"max_new_tokens": 16, "do_sample": False}
TREE = TokenTree.from_branching((24, 3))


@pytest.fixture(scope="module")
def head() -> MtpHead:
    """With a layer of the target's kind, and a projection of its own."""
    target = model_of("qwen3_5")
    with TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        weights = load_file(file)
        decoder = target.get_decoder()
        number = decoder.config.layer_types.index("full_attention")
        size = decoder.config.hidden_size
        layer = {f"mtp.layers.0.{name}": value.clone() for name, value in decoder.layers[number].state_dict().items()}
        norms = {
            f"mtp.{name}.weight": torch.zeros(size) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        }
        projection = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0)) * size**-0.5
        save_file(weights | layer | norms | {"mtp.fc.weight": projection}, file, metadata={"format": "pt"})
        return MtpHead.from_target(target, folder)


@pytest.mark.parametrize("rows", [1, 3])
def test_texts(rows: int, head: MtpHead) -> None:
    target, inputs = model_of("qwen3_5"), inputs_of("qwen3_5", rows)
    text = target.generate(**inputs, **CALL)
    found = target.generate(**inputs, **CALL, assistant_model=head, tree=TREE)
    assert found.tolist() == text.tolist()
    assert last_metrics().num_accepted_tokens > 0


def test_requests(head: MtpHead) -> None:
    """Beside a text."""
    target, image = model_of("qwen3_5"), inputs_of("qwen3_5", 1)
    words = image["input_ids"][:, :7]
    texts = [target.generate(**inputs, **CALL)[0].tolist() for inputs in (image, {"input_ids": words})]
    outputs = target.generate_batch(
        [image, words[0].tolist()], assistant_model=head, tree=TREE, continuous_batching_config=limits(), **CALL
    )
    assert [output.prompt_ids + output.generated_tokens for output in outputs.values()] == texts
    assert sum(output.speculation.num_accepted_tokens for output in outputs.values()) > 0
