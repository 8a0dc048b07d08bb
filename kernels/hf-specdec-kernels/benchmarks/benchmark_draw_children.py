"""
Times one level of drawn children: `draw_children` against the operations of PyTorch that do the same, in CUDA graphs.

    python benchmarks/benchmark_draw_children.py                     # the table, some minutes
    python benchmarks/benchmark_draw_children.py --batch 1 --vocab 49152
    python benchmarks/benchmark_draw_children.py --sweep             # tries other parts of the vocabulary

A level is scaled by the temperatures of its rows, its children are drawn without replacement, and log q of each is
found; for dynamic trees also log q of the best tokens. `draft_tokens`, which finds the best tokens as greedy steps do,
is the floor. Logits are bfloat16 and lie in the L2 cache where they fit, as they do after the draft's last layer. A
level's filters (top-k of 50, top-p of 0.9, both) and overlaps of p and q at six temperatures are timed, too. Equality
with the naive version is checked first. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from measuring import Time, attempt, environment, require_cuda, time_calls

from hf_specdec_kernels import draft_overlaps, draft_tokens, draw_children, filter_logits
from hf_specdec_kernels.draft_tokens import draw_children_naive
from hf_specdec_kernels.draft_tokens import triton as launches
from hf_specdec_kernels.overlaps import draft_overlaps_naive


VOCABS, BATCHES, QUERIES, COUNTS = (49_152, 128_256), (1, 8, 64), (1, 2, 4, 8), (1, 2, 4)
CALLS_PER_GRAPH = 20


class Level:
    """Logits of one level and the values of its rows."""

    def __init__(self, vocab: int, batch: int, queries: int):
        self.logits = (3 * torch.randn(batch, queries, vocab, device="cuda")).bfloat16()
        self.heat, self.draft_heat = torch.full((2, batch), 0.8, device="cuda")

    def by_kernels(self, count: int, with_best: bool) -> Any:
        """As in a captured step, with the seeds and the product of the temperatures, which are made once a step."""
        seeds = torch.empty(len(self.logits), dtype=torch.int64, device="cuda").random_()
        heat = self.heat * self.draft_heat
        return draw_children(self.logits, count, seeds, temperature=heat, with_best=with_best)

    def by_operations(self, count: int, with_best: bool) -> Any:
        """What captured steps did before."""
        scores = self.logits.float() / self.heat[:, None, None] / self.draft_heat[:, None, None]
        relative = scores - scores.amax(dim=-1, keepdim=True)
        noise = torch.empty_like(scores).exponential_().log_()
        perturbed = (relative - noise).topk(count, dim=-1)
        drawable = (perturbed.values > -torch.inf) & perturbed.values[..., :1].isfinite()
        if not with_best:
            return perturbed.indices, drawable
        log_q = scores.log_softmax(dim=-1)
        return perturbed.indices, drawable, log_q.topk(count, dim=-1).values, log_q.gather(-1, perturbed.indices)

    def best(self, count: int) -> Any:
        return draft_tokens(self.logits, count)


def timed(call: Callable[[], Any]) -> Time:
    return time_calls([call] * CALLS_PER_GRAPH, replays=20)


def check() -> None:
    """Checks equality with the naive version, but for rare draws that rounding decides."""
    for vocab, batch, queries, count in ((49_152, 1, 1, 4), (128_256, 8, 4, 4), (128_256, 64, 8, 2)):
        level, seeds = Level(vocab, batch, queries), torch.arange(batch, device="cuda")
        found = draw_children(level.logits, count, seeds, temperature=level.heat, with_best=True)
        for row in range(0, batch, 16):  # the naive version takes much memory
            own = slice(row, row + 1)
            expected = draw_children_naive(level.logits[own], count, seeds[own], 0, level.heat[own])
            differ = int((found.tokens[own] != expected[0]).sum())
            if differ > 1:
                raise SystemExit(f"{differ} draws of row {row} differ from the naive version.")
            torch.testing.assert_close(found.best[own], expected[2], atol=1e-4, rtol=1e-4)
    print("equal to the naive version")


def measure(vocab: int, batch: int, queries: int, count: int) -> dict[str, Any]:
    """Times one setting; one row of the table."""
    level = Level(vocab, batch, queries)
    calls = {
        "drawn": lambda: level.by_kernels(count, False),
        "drawn by operations": lambda: level.by_operations(count, False),
        "with best": lambda: level.by_kernels(count, True),
        "with best by operations": lambda: level.by_operations(count, True),
        "best alone": lambda: level.best(count),
    }
    row: dict[str, Any] = {"vocab": vocab, "batch": batch, "queries": queries, "count": count}
    for name, call in calls.items():
        time = attempt(name, lambda call=call: timed(call))
        row[name] = None if time is None else 1e3 * time.median
    times = ", ".join(f"{name} {row[name]:.1f}" for name in calls if row[name] is not None)
    print(f"vocabulary {vocab}, batch {batch}, {queries} queries, {count} children: µs a level: {times}")
    return row


def filtered_by_operations(logits: torch.Tensor, heat: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> Any:
    """What captured steps did before: filters that look at the best 256 tokens."""
    scores = logits.float() / heat[:, None, None]
    best = scores.topk(256, dim=-1).values
    total, ranks = scores.logsumexp(dim=-1, keepdim=True), torch.arange(256, device=logits.device)
    filters = ((top_k > 0) & (top_k <= 256))[:, None, None]
    hidden = (ranks >= top_k[:, None, None]) & filters
    total = torch.where(filters, best.masked_fill(hidden, -torch.inf).logsumexp(dim=-1, keepdim=True), total)
    chances = (best - total).exp()
    hidden = (hidden | (chances.cumsum(dim=-1) - chances >= top_p[:, None, None])) & (ranks > 0)
    last = best.masked_fill(hidden, torch.inf).amin(dim=-1, keepdim=True)
    return scores.masked_fill((scores < last) & (filters | (top_p < 1.0)[:, None, None]), -torch.inf)


def measure_filters(vocab: int, batch: int, queries: int) -> dict[str, Any]:
    """Times the filters of one level."""
    level, row = Level(vocab, batch, queries), {"vocab": vocab, "batch": batch, "queries": queries}
    for name, k, p in (("top-k", 50, 1.0), ("top-p", 0, 0.9), ("both", 50, 0.9)):
        top_k, top_p = torch.full((batch,), k, device="cuda"), torch.full((batch,), p, device="cuda")
        values = {"temperature": level.heat, "top_k": top_k, "top_p": top_p}
        row[name] = 1e3 * timed(lambda values=values: filter_logits(level.logits, **values)).median
        told = level.logits, *values.values()
        row[f"{name} by operations"] = 1e3 * timed(lambda told=told: filtered_by_operations(*told)).median
    times = ", ".join(f"{name} {value:.1f}" for name, value in row.items() if isinstance(value, float))
    print(f"filters, vocabulary {vocab}, batch {batch}, {queries} queries: µs a level: {times}")
    return row


def measure_overlaps(vocab: int, batch: int) -> dict[str, Any]:
    logits, draft_logits = (3 * torch.randn(2, batch, vocab, device="cuda")).bfloat16()
    heat, grid = torch.full((batch,), 0.8, device="cuda"), torch.tensor([1.4, 1.0, 0.7, 0.5, 0.35, 0.25]).cuda()
    options = {"temperature": heat, "draft_temperature": heat}
    ours = timed(lambda: draft_overlaps(logits, draft_logits, grid, **options))
    naive = timed(lambda: draft_overlaps_naive(logits, draft_logits, grid, **options))
    print(f"overlaps, vocabulary {vocab}, batch {batch}: {1e3 * ours.median:.1f} µs, by operations "
          f"{1e3 * naive.median:.1f} µs")  # fmt: skip
    return {"vocab": vocab, "batch": batch, "overlaps": 1e3 * ours.median, "by operations": 1e3 * naive.median}


def sweep(vocab: int, batch: int, queries: int, count: int) -> list[dict[str, Any]]:
    """Times other sizes of parts."""
    level, rows = Level(vocab, batch, queries), []
    kept = launches.SMALLEST_BLOCK, launches.LARGEST_BLOCK
    for block in (512, 1024, 2048, 4096, 8192, 16384):
        launches.SMALLEST_BLOCK = launches.LARGEST_BLOCK = block
        time = attempt(f"parts of {block}", lambda: timed(lambda: level.by_kernels(count, True)))
        if time is not None:
            rows.append({"vocab": vocab, "batch": batch, "queries": queries, "count": count, "block": block})
            rows[-1]["us"] = 1e3 * time.median
            print(f"vocabulary {vocab}, batch {batch}, {queries} queries, {count} children, parts of {block}: {time}")
    launches.SMALLEST_BLOCK, launches.LARGEST_BLOCK = kept
    return rows


@torch.inference_mode()
def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Times one level of drawn children.")
    parser.add_argument("--sweep", action="store_true", help="other parts of the vocabulary instead")
    for name, values in (("vocab", VOCABS), ("batch", BATCHES), ("queries", QUERIES), ("count", COUNTS)):
        parser.add_argument(f"--{name}", nargs="+", type=int, default=list(values))
    options = parser.parse_args()
    require_cuda()
    torch.manual_seed(0)
    check()
    print(environment())
    settings = list(itertools.product(options.vocab, options.batch, options.queries, options.count))
    if options.sweep:
        found: dict[str, Any] = {"sweep": [row for setting in settings for row in sweep(*setting)], **environment()}
    else:
        overlaps = [measure_overlaps(*setting) for setting in itertools.product(options.vocab, options.batch)]
        levels = itertools.product(options.vocab, options.batch, options.queries)
        filters = [measure_filters(*setting) for setting in levels]
        found = {"rows": [measure(*setting) for setting in settings], "overlaps": overlaps, **environment()}
        found["filters"] = filters
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
