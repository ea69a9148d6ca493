"""What the simulator raises."""


class SimulatorError(Exception):
    """Base of what this package raises; the message is for people and names the fix."""


class SettingsError(SimulatorError):
    """A setting, or a combination of settings, that no engine could run with."""


class ListenError(SimulatorError):
    """An address that cannot be listened on."""


class RequestError(SimulatorError):
    """A request that an engine refuses, with the status and the error type vLLM gives it."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class DemoError(SimulatorError):
    """The demo could not be carried through: a process died, a request failed."""


class WorkloadError(SimulatorError):
    """A request of a workload that did not succeed; the run is worth nothing then."""


class TraceError(SimulatorError):
    """A trace that cannot be read, or a workload that does not exist."""
