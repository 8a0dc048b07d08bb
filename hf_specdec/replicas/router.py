"""The choice of a replica, as Ray Serve asks for it."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .loads import Loads
from .prefixes import PrefixTable


class PrefixRouter(RequestRouter):
    """
    Sends a request to the replica that knows most of the beginning of its text; see `PrefixTable`. The first argument
    of the request has the keys of its text.
    """

    def initialize_state(self, most_ahead: int = 8) -> None:
        """
        Args:
            most_ahead (`int`, *optional*, defaults to 8): see `PrefixTable`.
        """
        self._table: PrefixTable[str] = PrefixTable(most_ahead)
        self._loads = Loads()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas by rank; Ray Serve takes the first that is not full."""
        if pending_request is None:
            return [candidate_replicas]
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        key = _key(pending_request)
        self._loads.withdraw(key)  # it may have been chosen for, and the replica was full
        ranked = self._table.ranked(pending_request.args[0], self._loads.of(by_name))
        if ranked:
            self._loads.choose(key, pending_request, ranked[0])
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._loads.route(_key(pending_request), _name(replica_id))
        self._table.add(pending_request.args[0], _name(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads.complete(internal_request_id, _name(replica_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.forget(_name(replica_id))
        self._loads.forget(_name(replica_id))


def _key(request: PendingRequest) -> str:
    return request.metadata.internal_request_id


def _name(replica: ReplicaID) -> str:
    return str(replica.unique_id)
