"""
Bulk jobs on a cluster, by Ray Data: as many engines as there is room for answer a file of prompts.

    pip install -e ".[ray]"
    python examples/ray_data.py prompts.jsonl answers --engines 4 --gpus 1

The records and answers are those of `hf-specdec generate-file`, but in several files, and in no order: give each
record an `id`. A bad one is answered with its error. On a cluster, both paths are ones that all machines see (`s3://…`,
too). Records of a machine that dies are answered by another one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

import ray
from ray.data.block import BlockAccessor
from ray.data.datasource import BlockBasedFileDatasink

from hf_specdec import SpeculativeConfig
from hf_specdec.bulk import answering
from hf_specdec.serving.engine import EngineOptions
from hf_specdec.serving.errors import RequestRefused
from hf_specdec.trees.text import parse_tree


class Engine:
    """An actor with an engine, which answers blocks of lines."""

    def __init__(self, options: EngineOptions):
        self._context = answering(options)
        self._answers = self._context.__enter__()

    def __call__(self, block: dict[str, Any]) -> dict[str, list[str]]:
        return {"answer": asyncio.run(self._answer_all(block["text"]))}

    async def _answer_all(self, lines: Any) -> list[str]:
        return await asyncio.gather(*(self._answer(line) for line in lines))

    async def _answer(self, line: str) -> str:
        try:
            found = await self._answers.answer(line.encode())
        except RequestRefused as error:
            found = {"error": str(error), "record": line}
        return json.dumps(found)


class Lines(BlockBasedFileDatasink):
    """Files with an answer a line."""

    def write_block_to_file(self, block: BlockAccessor, file: Any) -> None:
        for text in block.to_arrow().column("answer"):
            file.write(text.as_py().encode() + b"\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a file of JSON lines, or a folder of such")
    parser.add_argument("output", help="a folder")
    parser.add_argument("--address", help="of a Ray cluster; default: a new one on this machine")
    parser.add_argument("--target", help="Hub id or folder; default: SmolLM2-135M-Instruct from a package")
    parser.add_argument("--draft", default="ngram", help="ngram, mtp, or Hub id or folder")
    parser.add_argument("--tree", default="default")
    parser.add_argument("--num-blocks", type=int, help="blocks of K/V memory of an engine; default: what fits")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="of an engine")
    parser.add_argument("--cpus", type=float, default=1, help="of an engine")
    parser.add_argument("--block", type=int, default=256, help="records that an engine gets at once")
    options = parser.parse_args(arguments)
    engine = EngineOptions(
        target=options.target,
        draft=options.draft,
        speculative_config=SpeculativeConfig(tree=parse_tree(options.tree)),
        device="cuda" if options.gpus else "cpu",
        dtype="bfloat16" if options.gpus else "float32",
        num_blocks=options.num_blocks,
    )
    ray.init(address=options.address, include_dashboard=False)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(int(options.cpus), 1)))}
    answers = ray.data.read_text(options.prompts).map_batches(
        Engine,
        fn_constructor_args=(engine,),
        batch_size=options.block,
        compute=ray.data.ActorPoolStrategy(size=options.engines),
        num_gpus=options.gpus,
        num_cpus=options.cpus,
        runtime_env={"env_vars": threads},
    )
    answers.write_datasink(Lines(options.output, file_format="jsonl"))
    print(f"The answers are in {options.output}.")


if __name__ == "__main__":
    main()
