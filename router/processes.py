"""``--workers N``: so many processes on one port, each a whole router. The kernel spreads connections.

They are forked before anything is opened: maps, sockets, threads and tracing are each process's own. All
that they share is the board on which each says what it has in flight, and what all have to know.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from types import FrameType

from events.address import host_and_port
from router import doors, queue_board, retries, shares, speeds, standings
from router.bells import Bells
from router.board import Row, Table
from router.errors import ListenError
from router.hint_board import HintBoard, SharedHints
from router.ledger import Ledger
from router.queue_board import SharedQueue
from router.replicas import StreamId
from router.seat_board import SeatBoard, SharedSeats
from router.settings import RouterSettings
from router.speeds import SharedLatency
from router.standings import SharedStandings

log = logging.getLogger(__name__)

STARTED_S = 5.0
"""A worker that ends sooner could not start. The next try waits for so long, where others serve meanwhile;
where none does it would not start then either.
"""
MORE_KEYS = 1 << 14
PR_SET_PDEATHSIG = 1
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Board:
    """What ``workers`` processes share: of each worker what it has in flight, waiting and tried again, by
    whom, and what it has just sent where; of all of them what was learned of replicas and sessions. There is
    room for ``keys`` API keys, and some more that may come later.
    """

    def __init__(self, workers: int, keys: int) -> None:
        self.loads = Table(workers, shares.MOST_STREAMS, shares.SHAPE, "streams")
        self.keys = Table(workers, keys + MORE_KEYS, doors.SHAPE, "API keys")
        self.pages = Table(workers, 1, "qq")
        self.hints = HintBoard(workers)
        self.retries = Table(workers, 1, retries.SHAPE)
        self.queues = Table(workers, queue_board.MOST_LINES, queue_board.SHAPE, "lines of the queue")
        self.bells = Bells(workers)
        self.seats = SeatBoard()
        self.speeds = Ledger(shares.MOST_STREAMS, speeds.SHAPE, "streams")
        self.standings = Ledger(standings.MOST_REPLICAS, standings.SHAPE, "replicas")

    def clear(self, worker: int) -> None:
        """A worker is no more: nothing of it counts any longer. Its hints go by themselves, in seconds; what
        it has found out of replicas stays.
        """
        for table in (self.loads, self.keys, self.pages, self.retries, self.queues):
            table.clear(worker)
        standings.let_go(self.standings, worker)


class Worker:
    """One of several processes: its number, from 0, the port that all of them listen on, and the board."""

    def __init__(self, number: int, port: int, board: Board) -> None:
        self.number = number
        self.port = port
        self._board = board

    @cached_property
    def _pages(self) -> Row:
        """Made by the process that writes to it: one that follows another finds the row cleared."""
        return self._board.pages.row(self.number)

    @property
    def workers(self) -> int:
        """How many there are."""
        return self._board.pages.rows

    def pages_at(self, port: int) -> None:
        """Tells the others where this one has its pages."""
        self._pages.put(b"", self.number, port)

    def others_pages(self) -> dict[int, int]:
        """The ports of the others' pages, by number."""
        return {int(number): int(port) for number, port in self._pages.others(b"")}

    def loads(self) -> Row:
        """Its row of the board."""
        return self._board.loads.row(self.number)

    def seats(self, streams: Callable[[], Set[StreamId]]) -> SharedSeats:
        """Where all workers have sent each session last."""
        return SharedSeats(self._board.seats, streams)

    def speeds(self) -> SharedLatency:
        """What all workers know of how fast streams are."""
        return SharedLatency(self._board.speeds)

    def hints(self) -> SharedHints:
        """Its hints, with those of the others."""
        return SharedHints(self._board.hints, self.number)

    def standings(self) -> SharedStandings:
        """How replicas have done lately, with all workers."""
        return SharedStandings(self._board.standings, self.number)

    def queue(self) -> SharedQueue:
        """What waits for room in the others."""
        return SharedQueue(self._board.queues.row(self.number), self.number, self._board.bells)

    def bell(self, call: Callable[[], None]) -> AbstractContextManager[None]:
        """Has ``call`` called when another worker rings."""
        return self._board.bells.heard(self.number, call)

    def retries(self) -> Row:
        """Its row of what is in flight, and of that what is tried again."""
        return self._board.retries.row(self.number)

    def keys(self) -> Row:
        """Its row of what API keys have used."""
        return self._board.keys.row(self.number)


class Workers:
    """Keeps ``settings.workers`` processes running, each in ``serve``, until a signal ends them all."""

    def __init__(self, settings: RouterSettings, serve: Callable[[Worker], None]) -> None:
        self._settings = settings
        self._serve = serve
        self._board = Board(settings.workers, len(settings.api_key))
        self._running: dict[int, tuple[Worker, float]] = {}
        self._stopping = False

    def run(self) -> int:
        """The exit code: 0 after a signal; that of a worker that could not start. Raises ListenError."""
        for forwarded in FORWARDED:
            signal.signal(forwarded, self._forward)
        with reserved(self._settings.listen) as port:
            for number in range(self._settings.workers):
                self._start(Worker(number, port, self._board))
            log.info("%d workers share port %d", self._settings.workers, port)
            return self._watch()

    def _watch(self) -> int:
        code = 0
        while self._running:
            pid, status = os.wait()
            if pid not in self._running:
                continue  # The first process of a container is given the orphans of all others.
            worker, since = self._running.pop(pid)
            self._board.clear(worker.number)
            if self._stopping:
                continue
            ended = os.waitstatus_to_exitcode(status)
            if self._has_started(since):
                log.error("worker %d ended (exit code %d) and is started again", worker.number, ended)
                self._start(worker)
            elif any(self._has_started(others_since) for _, others_since in self._running.values()):
                log.error(
                    "worker %d could not start (exit code %d) and is started again in %g s; others serve",
                    worker.number,
                    ended,
                    STARTED_S,
                )
                self._start(worker, STARTED_S)
            else:
                log.error("worker %d could not start (exit code %d)", worker.number, ended)
                code = ended if ended > 0 else 1
                self._forward(signal.SIGTERM, None)
        return code

    def _has_started(self, since: float) -> bool:
        return time.monotonic() - since >= STARTED_S

    def _forward(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP:
            self._stopping = True
        for pid in tuple(self._running):
            # One that has ended may be noted as running for a moment still.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self, worker: Worker, after_s: float = 0.0) -> None:
        # A signal waits until the child is known here, and has its own way with it: one that came in between
        # would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._be(worker, parent, after_s)
        self._running[pid] = worker, time.monotonic() + after_s
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if self._stopping:
            os.kill(pid, signal.SIGTERM)

    def _be(self, worker: Worker, parent: int, after_s: float) -> None:
        """The life of the child; it never returns."""
        code = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # It reads the settings when it is up; until then there is nothing to be read anew.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            _end_with(parent)
            time.sleep(after_s)
            self._serve(worker)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            log.exception("worker %d failed", worker.number)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _end_with(parent: int) -> None:
    """A worker does not outlive a parent that was killed: it would keep the port."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)  # It was killed before we asked to be told.


@contextmanager
def reserved(listen: str) -> Iterator[int]:
    """The port of ``listen``, or a free one for port 0; nobody else gets it meanwhile.

    Raises ListenError where somebody has it: sharing a port would let in other routers of the same user too.
    """
    host, port = host_and_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as alone, socket.socket(family) as shared:
        try:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))
            port = alone.getsockname()[1]
            alone.close()
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((host, port))
        except OSError as error:
            why = error.strerror or str(error)
            raise ListenError(f"cannot listen on {listen}: {why}; choose another --listen") from error
        yield port
