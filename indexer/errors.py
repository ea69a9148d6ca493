"""What this package raises."""


class IndexerError(Exception):
    """Base. The message names the thing, the value and the fix."""


class SettingsError(IndexerError):
    """A setting that cannot be used."""


class ListenError(IndexerError):
    """The address to listen on cannot be had."""


class MapError(IndexerError):
    """The map cannot be used."""


class MapMissingError(MapError):
    """There is no map in the folder (yet)."""


class MapSchemaError(MapError):
    """The map was written by another version."""


class MapBusyError(MapError):
    """Another indexer writes this map."""


class MapFullError(MapError):
    """The map has no room for the change; nothing of it was applied."""


class DiskFullError(MapError):
    """The disk of the map has no room; nothing of the change was applied."""


class TooLargeError(MapFullError):
    """The change alone would take the room that is needed to work; waiting does not help."""


class SlotsTakenError(MapFullError):
    """All slots are in use: for room, a retired one has to be collected; no block that goes makes any."""


class ShardDownError(IndexerError):
    """The shard that follows a stream does not answer."""


class RegistrationError(IndexerError):
    """A registration that cannot be taken."""


class UnknownInstanceError(IndexerError):
    """An instance that is not registered."""


class IndexerClientError(IndexerError):
    """A call to an indexer over HTTP failed."""


class IndexerUnreachableError(IndexerClientError):
    """No answer from the indexer."""


class IndexerAnswerError(IndexerClientError):
    """An answer that is an error, or that makes no sense; ``status`` is its HTTP status.

    ``unknown``: the indexer does not know the model or the instance that was asked for.
    """

    def __init__(self, message: str, status: int, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.unknown = unknown
