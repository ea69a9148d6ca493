"""A map that lives through what hypothesis makes up, and restarts of its indexer between."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


class RigMachine(RuleBasedStateMachine):
    """A rig with a folder of its own. ``make_rig`` and ``engine`` are the fixtures, given by :func:`run`."""

    make_rig: Any
    engine: Any

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="warmroute-map-"))
        self.rig = self.make_rig(self.folder)

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)

    def reopened(self) -> None:
        """The indexer ends and starts again; its engines go on."""
        sequences = self.rig.sequences
        self.rig.close()
        self.rig = self.make_rig(self.folder)
        self.rig.sequences = sequences
        self.rig.resume()


def run(machine: type[RigMachine], examples: int, steps: int, **fixtures: Any) -> None:
    """So many examples of at most so many steps each, with a test's fixtures as attributes of the machine."""
    run_state_machine_as_test(
        type(machine.__name__, (machine,), fixtures),
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )
