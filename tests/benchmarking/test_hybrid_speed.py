"""benchmarks/hybrid_speed.py, and the walks of a set length that it times."""

from __future__ import annotations

import json

import hybrid_speed
import pytest
import torch
from suite.set_walks import accepting
from support.graphs import install_stand_in

from hf_specdec.engine.captured.verdicts import Verdict
from hf_specdec.trees import DraftTree, TokenTree, Topology
from hf_specdec.verification import Verifier
from hf_specdec_kernels.rejection_sampling.walks import Walks


@pytest.mark.parametrize("name", hybrid_speed.TREES)
def test_walks_of_a_set_length(name: str) -> None:
    """They follow the best children, as far as there is room; of three rows the last rests."""
    pytest.importorskip("triton", reason="the kernels need triton")
    tree, length, _ = hybrid_speed.TREES[name]
    topology, nodes = Topology.of_tree(tree, torch.device("cpu")), tree.num_nodes + 1
    logits, tokens = torch.randn(3, nodes, 7), torch.randint(7, (3, nodes))
    tokens[1, 2:] = -1
    draft = DraftTree(tokens[:, 1:], topology)
    active, counts = torch.tensor([True, True, False]), []
    with accepting(tree, length, torch.device("cpu")):
        for _ in range(4):
            path, accepted, next_tokens = Verdict(Verifier.GREEDY).walk(
                logits, tokens, draft, max_depth=tree.depth, active=active
            )
            counts.append(int(accepted[0]))
            assert accepted.tolist() == [counts[-1], 1, -1]
            assert topology.parents[0][path[0, 1:]].tolist() == path[0, :-1].tolist()
            assert [tree.paths[node - 1] for node in path[0, 1:]] == [(0,) * depth for depth in range(1, 6)]
            ends = [int(logits[row, path[row, count]].argmax()) for row, count in enumerate([counts[-1], 1])]
            assert next_tokens.tolist() == [*ends, -1]
    assert sum(counts) == 4 * (length - 1) and max(counts) - min(counts) <= 1
    with pytest.raises(ValueError, match="`length` must be from 1 to 6"), accepting(tree, 6.5, torch.device("cpu")):
        pass


@pytest.mark.parametrize("other", [Verifier.FROM_TARGET, Verifier.REJECTION])
def test_walks_of_several_kinds_take_turns_on_their_own(other: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with sampled rows walk once for every kind; each alternates by itself, and draws its own next token."""
    tree = TokenTree.chain(4)
    draft = DraftTree(torch.zeros(1, 4, dtype=torch.long), Topology.of_tree(tree, torch.device("cpu")))
    given = Walks(torch.zeros(1, 5, dtype=torch.long), torch.tensor([0]), torch.tensor([6]))
    monkeypatch.setattr(Verdict, "walk", lambda *args, **options: given)
    counts: dict[Verifier, list[int]] = {Verifier.GREEDY: [], other: []}
    with accepting(tree, 2.5, torch.device("cpu")):
        for _ in range(4):
            for kind, found in counts.items():
                walked = Verdict(kind).walk(torch.eye(5)[None], torch.zeros(1, 5, dtype=torch.long), draft)
                found.append(int(walked.accepted[0]))
                assert walked.next_tokens.tolist() == [found[-1] if kind == Verifier.GREEDY else 6]
    assert counts == {Verifier.GREEDY: [1, 2, 1, 2], other: [1, 2, 1, 2]}


@pytest.mark.slow
def test_a_trial(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_stand_in(monkeypatch, with_kernel=True)
    monkeypatch.setattr(hybrid_speed, "stand_in", lambda: None)
    hybrid_speed.main("--shape tiny --prompt 24 --long-prompt 30 --max-new-tokens 29 --calls 1 --replays 2".split())
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name, (_, length, _) in hybrid_speed.TREES.items():
        assert found[name]["acceptance_length"] == length and found[name]["verify"] > 0 < found[name]["draft"]
    assert set(found["first_token"]) == {"call", "forward"}
    assert Verdict.walk.__module__.startswith("hf_specdec")
