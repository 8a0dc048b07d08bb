"""Random irregular trees."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def paths_of_trees(
    draw: st.DrawFn, max_nodes: int = 12, max_rank: int = 4, max_depth: int = 5, gaps: bool = True
) -> list[tuple[int, ...]]:
    """
    The rank paths of a random tree, in the order its nodes were added: each under a random earlier one. With `gaps` a
    child may come without its better-ranked siblings.
    """
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, max_nodes))):
        parent = draw(st.sampled_from([node for node in nodes if len(node) < max_depth]))
        taken = {node[-1] for node in nodes if node and node[:-1] == parent}
        free = [rank for rank in range(max_rank + 1) if rank not in taken]
        if free:
            nodes.append((*parent, draw(st.sampled_from(free)) if gaps else free[0]))
    return nodes[1:]
