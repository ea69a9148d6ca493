"""What one request has been through: the replicas that it was sent to, and what came of it."""

from __future__ import annotations

from router.errors import RETRY_AFTER_S, RefusedError
from router.exchange import Exchange
from router.headers import REQUEST_ID
from router.kept import KeptAnswer

UNREACHABLE, DISCONNECTED, STALE = "unreachable", "disconnected", "stale"
CONNECT_TIMEOUT, NONSENSE, BROKEN = "connect-timeout", "nonsense", "broken"


class AttemptFailedError(Exception):
    """A replica that failed, while the client has seen no byte of an answer. ``code`` is for metrics;
    ``said`` is what the client gets when no other replica can do better.
    """

    def __init__(
        self, replica: str, code: str, message: str, said: KeptAnswer | RefusedError | None = None
    ) -> None:
        super().__init__(message)
        self.replica = replica
        self.code = code
        self.said = said


class Journey:
    """What one request has been through: its policy, its exchanges, the replicas that failed it, how it
    ended.

    ``last`` is the exchange that the client's answer is of; ``answer`` what a replica said that failed.
    ``killed`` are those of ``failed`` that broke off without a word while they worked on it; ``at_failing``:
    it is being tried again, at a replica that fails others too.
    """

    def __init__(self, request_id: str, policy: str) -> None:
        self.request_id = request_id
        self.policy = policy
        self.exchanges: list[Exchange] = []
        self.failed: set[str] = set()
        self.killed: set[str] = set()
        self.at_failing = False
        self.stale = False
        self.status: str | None = None
        self.last: Exchange | None = None
        self.answer: tuple[Exchange, KeptAnswer | RefusedError] | None = None

    def headers(self) -> dict[str, str]:
        """The headers for an answer of our own: the decision's, if it was the chosen replica that let us
        down.
        """
        headers = {REQUEST_ID: self.request_id}
        if self.last is not None and self.last.status.isdecimal():
            headers |= self.last.decision.headers()
        return headers

    def note(self, failure: AttemptFailedError) -> None:
        """An attempt failed. One over a connection that had gone stale is made again on a new one."""
        if failure.code == STALE:
            self.stale = True
            return
        self.failed.add(failure.replica)
        if failure.code == DISCONNECTED:
            self.killed.add(failure.replica)
        if failure.said is not None:
            self.answer = self.exchanges[-1], failure.said

    def out_of_attempts(self) -> RefusedError:
        """Why it is not tried any more: often enough."""
        return _unavailable(f"no replica could be reached (tried {_list(self.failed)})", "no replica reached")

    def over_budget(self) -> RefusedError:
        """Why it is not tried any more: too much is."""
        return _unavailable(
            f"tried {_list(self.failed)}; the others fail too, and enough is being tried again there",
            "retry budget used up",
        )

    def deadly(self) -> RefusedError:
        """Why it is not tried any more: engines die for other reasons too, but not often two in a row of one
        request.
        """
        return RefusedError(
            502,
            "BadGatewayError",
            f"replicas {_list(self.killed)} broke off while they worked on this request; no other is asked",
            reason="replicas died",
        )


def _list(replicas: set[str]) -> str:
    return ", ".join(sorted(replicas))


def _unavailable(message: str, reason: str) -> RefusedError:
    return RefusedError(503, "ServiceUnavailableError", message, retry_after=RETRY_AFTER_S, reason=reason)
