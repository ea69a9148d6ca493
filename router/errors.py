"""What this package raises."""

from __future__ import annotations


class RouterError(Exception):
    """Base. The message names the thing, the value and the fix."""


class SettingsError(RouterError):
    """A setting that cannot be used."""


class ListenError(RouterError):
    """The address to listen on cannot be had."""


class RecordError(RouterError):
    """A recording that cannot be written."""


class LookupFailedError(RouterError):
    """The index gave no answer that can be used. ``code`` names the kind, for metrics."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class UpstreamError(RouterError):
    """A call to a replica failed before or during its answer."""


class UnreachableError(UpstreamError):
    """No connection to the replica: refused, no route, no name."""


class ConnectTimeoutError(UnreachableError):
    """No answer to the connect in time: a host that is gone, or one that is very busy, be it our own."""


class DisconnectedError(UpstreamError):
    """The replica closed the connection without a byte of answer.

    ``stale``: a kept-alive connection was reused.
    """

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale


class UpstreamTimeoutError(UpstreamError):
    """The replica was silent for longer than the idle timeout."""


class BrokenAnswerError(UpstreamError):
    """The replica's answer ended before it was complete."""


class RefusedError(RouterError):
    """A request that we answer ourselves, with an error in OpenAI's shape.

    ``status`` is the HTTP status, ``kind`` the error's ``type``, ``param`` the field it is about,
    ``retry_after`` in seconds.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after = retry_after
        self.reason = reason or message


RETRY_AFTER_S = 2
"""Where nothing says when it will be better."""


class SaturatedError(RefusedError):
    """No replica has room. ``code`` is a bounded label for metrics: saturated, queue full, queue timeout. Who
    knows when there will be some sets ``retry_after``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(503, "ServiceUnavailableError", message, retry_after=RETRY_AFTER_S, reason=code)
        self.code = code
