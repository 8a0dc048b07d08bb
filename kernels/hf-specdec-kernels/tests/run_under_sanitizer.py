"""
Runs every kernel on small inputs with all its options, for memory and race checks.

    compute-sanitizer --tool memcheck python tests/run_under_sanitizer.py
    compute-sanitizer --tool racecheck python tests/run_under_sanitizer.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "torch-ext")]

from test_kv_compaction import test_against_naive as check_compaction  # noqa: E402
from test_layers import test_gated_products as check_gated_products  # noqa: E402
from test_layers import test_norms as check_norms  # noqa: E402
from test_layers import test_rotary as check_rotary  # noqa: E402
from test_layers import test_writes_of_kv as check_writes_of_kv  # noqa: E402
from test_merged_linear import SMALL as SMALL_TILES  # noqa: E402
from test_merged_linear import compare as check_linear  # noqa: E402
from test_merged_linear import random as random_matrix  # noqa: E402
from test_rejection_sampling import DRAFTED, FILTERED, arguments_of, room  # noqa: E402
from test_tree_attention import SMALL, compare  # noqa: E402
from test_tree_conv import test_against_naive as check_conv  # noqa: E402
from test_tree_delta_rule import CASES as DELTA_RULES  # noqa: E402
from test_tree_delta_rule import run as check_delta_rule  # noqa: E402
from test_tree_selective_scan import CASES as SCANS  # noqa: E402
from test_tree_selective_scan import run as check_scan  # noqa: E402
from test_tree_ssd import CASES as SPACES  # noqa: E402
from test_tree_ssd import run as check_ssd  # noqa: E402

from hf_specdec_kernels import (  # noqa: E402
    best_paths,
    choose_nodes,
    draft_overlaps,
    draft_tokens,
    draw_children,
    exponential_noise,
    share_out,
    tree_ancestors,
)
from hf_specdec_kernels.rejection_sampling import triton as launches  # noqa: E402


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device.")
    device = torch.device("cuda")
    torch.manual_seed(0)
    for name, case in SMALL.items():
        for num_splits in (1, 3):
            compare(replace(case, num_splits=num_splits), device)
        print("attention:", name)
    for page_size in (None, 4):
        check_compaction(40, 37, 16, page_size, torch.bfloat16, device)
    print("compaction")
    linears_and_draft_tokens(device)
    check_norms("offset", torch.bfloat16, device)
    check_gated_products("silu", torch.bfloat16, device)
    check_rotary("halves", 12, False, torch.bfloat16, device)
    check_writes_of_kv(3, 8, 8, torch.bfloat16, device)
    print("norms, gated products, rotary embedding, writes of K/V")
    for check, cases in ((check_delta_rule, DELTA_RULES), (check_ssd, SPACES), (check_scan, SCANS)):
        for name, case in cases.items():
            check(case, device)
            print(f"{check.__module__.removeprefix('test_')}: {name}")
    check_conv(9, 4, (3, 0, -1), torch.bfloat16, 2, device)
    for name, case in (FILTERED | DRAFTED).items():
        arguments = arguments_of(case, device)
        of_target = {name: value for name, value in arguments.items() if not name.startswith("draft_")}
        for launches.PREPARED_NODES, launches.LARGEST_BLOCK in ((0, 64), (264, 16384)):
            launches.launch_target_walk(**of_target, **room(case, arguments, device)._asdict())
            chosen = {name: of_target[name] for name in ("tokens", "parents", "max_depth", "end_tokens", "active")}
            chosen["chosen"] = of_target["logits"].argmax(-1)
            launches.launch_chosen_walk(**chosen, **room(case, arguments, device)._asdict())
            launches.launch_rejection_walk(**arguments, **room(case, arguments, device)._asdict())
        print("walks:", name)
    torch.cuda.synchronize()


def linears_and_draft_tokens(device: torch.device) -> None:
    for rows, features, sizes in ((1, 64, (40, 16, 24)), (9, 70, (48, 5)), (37, 96, (33,))):
        matrices = [random_matrix(number, features, dtype=torch.float16, device=device) for number in (rows, *sizes)]
        for tiles in (SMALL_TILES, None):
            check_linear(matrices[0], matrices[1:], tiles)
    print("linear layers")
    for vocab in (97, 5000):
        logits, temperature = torch.randn(2, 3, vocab, device=device), torch.tensor([0.5, 1.0], device=device)
        draft_tokens(logits, 8, temperature=temperature)
        seeds = torch.arange(2, device=device)
        draw_children(logits, 8, seeds, positions=seeds[:, None], token_ids=torch.arange(vocab, device=device))
        exponential_noise(seeds, seeds[:, None], vocab)
        tokens, log_q, best = draw_children(logits, 8, seeds, temperature=temperature, with_best=True)
        share_out(tokens[..., 0], log_q[..., 0], tokens[..., 0] >= 0, best, tokens, log_q, 11, 5, 4)
        draft_overlaps(logits[:, 0], logits[:, 1], torch.tensor([0.5, 1.0], device=device), temperature=temperature)
        tree_ancestors(best_paths(tokens, log_q, 11)[1], 11)
        best_paths(tokens[:, :, None], log_q[:, :, None], 11, torch.zeros_like(tokens[:, :, None]))
        choose_nodes(tokens, log_q, log_q[..., 0], tokens[..., :5] >= 0, 5)
    print("draft tokens, drawn children, budgets, overlaps, best paths")


if __name__ == "__main__":
    main()
