"""The longest chain of things that name each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def longest_chain(levels: Mapping[str, int], inner: Mapping[str, Collection[str]]) -> int:
    """
    The levels of the longest chain of names, each of which names the next one, by Tarjan's algorithm: those in a
    circle are all in it.

    Args:
        levels (`Mapping[str, int]`): by name, how many levels it is itself.
        inner (`Mapping[str, Collection[str]]`): by name, the names in it, of which each has levels.
    """
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    depth: dict[str, int] = {}
    open_ones: list[str] = []
    for first in levels:
        work = [] if first in order else [(first, iter(inner[first]))]
        if work:
            order[first] = low[first] = len(order)
            open_ones.append(first)
        while work:
            one, names = work[-1]
            for name in names:
                if name not in order:
                    order[name] = low[name] = len(order)
                    open_ones.append(name)
                    work.append((name, iter(inner[name])))
                    break
                if name not in depth:
                    low[one] = min(low[one], order[name])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[one])
                if low[one] == order[one]:
                    circle = [open_ones.pop()]
                    while circle[-1] != one:
                        circle.append(open_ones.pop())
                    below = [depth[name] for each in circle for name in inner[each] if name in depth]
                    total = sum(levels[each] for each in circle) + max(below, default=0)
                    depth.update(dict.fromkeys(circle, total))
    return max(depth.values(), default=0)
