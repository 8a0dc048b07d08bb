"""Rollouts of reinforcement learning: a trainer's own calls speculate, and a head follows the policy."""

from .online_head import OnlineHead
from .rollouts import Rollouts, rollouts


__all__ = ["OnlineHead", "Rollouts", "rollouts"]
