"""Drafting with the MTP modules of the target."""

from __future__ import annotations

from typing import Any

from .eagle import EagleDrafter


class MtpDrafter(EagleDrafter):
    """
    Drafts with one MTP module. Rows and trees are those of an EAGLE head: the module runs once for a level, over its
    own outputs.

    Args:
        head (`MtpHead`): the module.
    """

    head: Any
    runs_in_graphs = True
