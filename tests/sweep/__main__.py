"""
Runs the sweep, or a part of it:
`python -m tests.sweep [MODEL_TYPE …] [--shard 1/4] [--results FILE] [--write | --update | --compare PAGE]`.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from pathlib import Path

import torch
import transformers


sys.path.insert(0, str(Path(__file__).parents[1]))  # `support`

from .registry import all_pairs  # noqa: E402
from .results import read_results, write_results  # noqa: E402
from .running import run  # noqa: E402
from .states import states_of  # noqa: E402
from .table import changes, summaries_in, write_table  # noqa: E402


def main() -> int:
    """Prints a line per pair and the counts. Returns 1 if a pair failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="only these architectures")
    parser.add_argument("--shard", default="1/1", help="the part of the pairs to run: 2/4 is the second of four")
    parser.add_argument("--results", type=Path, help="a JSON file to which results are added")
    parser.add_argument("--write", type=Path, help="a page whose table is written from all results")
    parser.add_argument("--update", type=Path, help="as --write, but what a page says of other pairs stays")
    parser.add_argument("--compare", type=Path, help="a page: prints what the results say otherwise than its table")
    parser.add_argument("--resume", action="store_true", help="leave out pairs that --results has")
    parser.add_argument("--states", action="store_true", help="only pairs that have layers with states")
    parser.add_argument("--no-run", action="store_true", help="only count, and write the table of, --results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    results = read_results(options.results) if options.results else {}
    if not options.no_run:
        part, parts = map(int, options.shard.split("/"))
        pairs = [pair for pair in all_pairs() if not options.model_types or pair.model_type in options.model_types]
        if options.states:
            pairs = [pair for pair in pairs if states_of(pair)]
        for pair in pairs[part - 1 :: parts]:
            if options.resume and pair in results:
                continue
            results[pair] = run(pair)
            print(results[pair].line(), flush=True)
            if options.results:
                write_results(options.results, results)
    counts = collections.Counter(result.summary for result in results.values())
    print(f"transformers {transformers.__version__}:", ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    for page in filter(None, (options.write, options.update, options.compare)):
        found = {pair: result.summary for pair, result in results.items()}
        said = {pair: one for pair, one in summaries_in(page).items() if options.write or pair in found}
        print(f"Beside {page}:", *(changes(said, found) or ["no changes"]), sep="\n  ")
    if options.write:
        write_table(options.write, list(results.values()))
    if options.update:
        write_table(options.update, list(results.values()), keeps=True)
    return int(counts["failure"] > 0)


sys.exit(main())
