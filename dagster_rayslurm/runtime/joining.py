"""The workers that one cluster waits for: who shall join, who will not after all, who is missing, and what their logs say."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from .nodes import Nodes, alive, nodes_expected, present
from .spec import RaySpec
from .team import Member, Others


class Joining:
    """Keeps account of the workers of one cluster.

    Args:
        spec: what is asked for.
        team: the other nodes; None if there are none.
    """

    def __init__(self, spec: RaySpec, team: Optional[Others]) -> None:
        self.places: List[int] = []
        """The workers that shall join, by place."""
        self.tails: Dict[str, str] = {}
        """The last lines of logs of workers that did not join."""
        self._spec = spec
        self._team = team
        self._given_up: Set[int] = set()
        self._failures: Set[Tuple[int, int]] = set()
        """Workers whose Ray failed, and in which attempt."""
        self._told: Set[int] = set()
        """Workers that know that their Ray counts."""
        if team is not None:
            self.places = sorted(team.members)[: nodes_expected(spec, 1 + len(team.members)) - 1]

    @property
    def expected(self) -> int:
        """Nodes that the cluster has when it is complete, the head included."""
        return 1 + len(self.places)

    @property
    def needed(self) -> int:
        """Nodes without which it does not start."""
        return self.expected if self._spec.min_nodes is None else min(self._spec.min_nodes, self.expected)

    @property
    def members(self) -> List[Member]:
        """The workers that shall join."""
        return [self._team.members[place] for place in self.places] if self._team is not None else []

    def order(self, **order: Any) -> None:
        """Tell all of them something."""
        if self._team is not None:
            self._team.order(self.places, **order)

    def is_news(self, member: Member, attempt: int) -> bool:
        """Whether the failure of a worker's Ray in this attempt was not known; a node that is back tells of it once more."""
        known = (member.node_id, attempt) in self._failures
        self._failures.add((member.node_id, attempt))
        return not known

    def give_up(self, member: Member) -> bool:
        """Wait for a worker no more; whether enough others may still join."""
        self._given_up.add(member.node_id)
        return self.expected - len(self._given_up) >= self.needed

    def tell_those_in(self, nodes: Nodes, **order: Any) -> None:
        """Tell those something that the table of nodes has, each of them once."""
        here = present(nodes)
        for member in self.members:
            if member.node_id not in self._told and member.joined and member.identity in here:
                self._told.add(member.node_id)
                assert self._team is not None
                self._team.order([member.node_id], **order)

    def keep_tails(self, member: Member, tails: Mapping[str, str]) -> None:
        """Keep what the logs of a worker's Ray say."""
        for name, text in tails.items():
            self.tails["%s on %s" % (name, member.title)] = text

    def keep_log(self, member: Member) -> None:
        """Keep what a worker's runtime had to say."""
        assert self._team is not None
        tail = self._team.log_tail(member)
        if tail.strip():
            self.tails["runtime on %s" % member.title] = tail

    def who_is_missing(self, nodes: Nodes) -> str:
        """Names the workers that are not in the table of nodes, and keeps what their logs say."""
        here = present(nodes)
        missing = [member for member in self.members if not member.joined or member.identity not in here]
        unheard = [member.title for member in missing if not member.here]
        for member in missing:
            self.keep_log(member)
        joined = "%d of %d nodes joined" % (len(alive(nodes)), self.expected)
        what = "%s, missing: %s" % (joined, ", ".join(member.title for member in missing))
        if unheard:
            what += " (no word from the runtime on %s)" % ", ".join(unheard)
        return what
