"""Kills training processes at random moments, and holds them to the run without a kill.

A run is killed until it has ended: a life begins at the last checkpoint and is killed
after a random part of the time that a whole life takes, most often where it then enters
a phase drawn at random. What each life restored, and what the run ended with, is the
uninterrupted run's, bit for bit.
"""

import collections
import dataclasses
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import time

from helpers import apart, trainer
from helpers.trainer import PHASES

#: Seconds after which a life hangs.
PATIENCE = 300


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a training run is started."""

    way: str  # Of `trainer.WAYS`.
    processes: int  # how many train together
    share: float  # of the kills of a run of all kinds
    devices: int = 1  # how many each process has
    last: int = 60  # the last step


KINDS = {
    "adamw": Kind("adamw", 1, 0.3),
    "8 bits": Kind("8 bits", 1, 0.3),
    "layerwise, weights on the host": Kind("layerwise", 1, 0.2),
    "four processes": Kind("adamw", 4, 0.1),
    "four processes, layerwise, deferred": Kind("deferred", 4, 0.1, devices=2, last=20),
}


@dataclasses.dataclass
class Count:
    """What came of some kills."""

    #: How many fell into each phase.
    phases: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    exact: int = 0  # of how many the run went on, and ended, with the right bits
    runs: int = 0  # how many runs there were
    lives: int = 0  # of how many lives
    resumed: int = 0  # how many of them restored a checkpoint
    #: How many did not begin, because processes came too late for one another.
    late: int = 0


class Life:
    """Processes that train in a folder."""

    def __init__(
        self, kind: Kind, folder: pathlib.Path, cache: pathlib.Path, *flags: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._logs = [folder / f"output{i}" for i in range(kind.processes)]
        self.processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        for number, log in enumerate(self._logs):
            (folder / f"phase{number}").write_bytes(b"\0")
            with log.open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        _command(kind, folder, number, port, flags),
                        env=_environment(kind, cache),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def phase(self, number: int) -> str:
        """What a process is doing, or was when it was killed."""
        return PHASES[self._place(number)]

    def _place(self, number: int) -> int:
        return (self._folder / f"phase{number}").read_bytes()[0]

    def wait(self, seconds: float, phase: str | None = None) -> bool:
        """Waits for the end, or for all to be in a phase or past it; whether they are.

        Raises:
          RuntimeError: If one of them failed.
        """
        deadline = time.monotonic() + seconds
        numbers = range(len(self.processes))
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self.processes]
            if any(codes):
                self.kill()
                outputs = "\n\n".join(x.read_text() for x in self._logs)
                raise RuntimeError(f"training ended by {codes}:\n{outputs}")
            if None not in codes:
                return True
            if phase and min(map(self._place, numbers)) >= PHASES.index(phase):
                return True
            time.sleep(min(0.01, max(deadline - time.monotonic(), 0)))
        return False

    def catch(self, number: int, phase: str) -> bool:
        """Waits until a process is in a phase; whether it was before the end."""
        while self.phase(number) != "ending" and self.processes[number].poll() is None:
            if self.phase(number) == phase:
                return True
            time.sleep(5e-4)
        return False

    def reach(self, phase: str | None) -> None:
        """Waits until all are there; None is the end."""
        if not self.wait(PATIENCE, phase):
            self.kill()
            raise RuntimeError(f"training hangs while {self.phase(0)}")

    def kill(self, victim: int = 0) -> None:
        """Kills one process; those that could only wait for it go with it."""
        for process in [self.processes[victim], *self.processes]:
            process.kill()
            process.wait()


def _command(
    kind: Kind, folder: pathlib.Path, number: int, port: int, flags: tuple[str, ...]
) -> list[str]:
    command = [sys.executable, "-W", "error", trainer.__file__]
    command += [kind.way, str(folder), str(kind.last), *flags]
    command += ["--processes", str(kind.processes), "--number", str(number)]
    return [*command, "--port", str(port)]


def _environment(kind: Kind, cache: pathlib.Path) -> dict[str, str]:
    """A process's devices, and programs compiled once."""
    flags = f"--xla_force_host_platform_device_count={kind.devices}"
    return apart.environment(flags) | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def read(folder: pathlib.Path) -> list[tuple[str, int, str]]:
    """What a run wrote: an event, the step, and the digest of all bits."""
    lines = (folder / "log").read_text().splitlines()
    return [(event, int(step), bits) for event, step, bits in map(str.split, lines)]


def saved(folder: pathlib.Path) -> int:
    """The last step of which there is a whole checkpoint; 0 if there is none."""
    steps = [x.parent.name for x in (folder / "saved").glob("*/commit_success.txt")]
    # One that Orbax is about to rename has a name with more than the number.
    return max((int(x) for x in steps if x.isdigit()), default=0)


class Runs:
    """Runs of one kind, and the uninterrupted one that they are held to."""

    def __init__(self, kind: Kind, folder: pathlib.Path) -> None:
        self._kind, self._folder, self._cache = kind, folder, folder / "compiled"
        folder.mkdir(exist_ok=True)
        Life(kind, folder / "straight", self._cache, "--straight").reach(None)
        self.bits = {step: bits for _, step, bits in read(folder / "straight")}
        assert [*self.bits] == [*range(0, kind.last + 1, trainer.SAVED_EVERY)]

    def life(self, folder: pathlib.Path, *flags: str) -> Life:
        return Life(self._kind, folder, self._cache, *flags)

    def whole(self, folder: pathlib.Path) -> float:
        """The seconds for which a life that is not killed may lose something."""
        life = self.life(folder)
        life.reach("restoring")
        started = time.monotonic()
        life.reach("ending")
        seconds = time.monotonic() - started
        life.reach(None)
        self.check(folder)
        return seconds

    def check(self, folder: pathlib.Path) -> int:
        """Holds a run that ended to the uninterrupted one; how often it resumed."""
        events = read(folder)
        assert events[-1][:2] == ("ended", self._kind.last)
        steps = [step for _, step, _ in events]
        assert steps == sorted(steps), "an older checkpoint than the last was restored"
        for event, step, bits in events:
            assert bits == self.bits[step], f"{event} {step}: other bits"
        return sum(event == "restored" and step > 0 for event, step, _ in events)

    def killed(self, kills: int, seed: int, seconds: float | None = None) -> Count:
        """As many kills, in as many runs as they take.

        A life is killed within some seconds; None: as many as a whole one takes.
        """
        chance, count = random.Random(seed), Count()
        if seconds is None:
            seconds = self.whole(self._folder / "whole")
        while (done := count.phases.total()) < kills:
            folder = self._folder / f"run{count.runs}"
            while self._life_and_death(folder, chance, seconds, kills, count):
                pass
            count.resumed += self.check(folder)
            count.exact += count.phases.total() - done
            count.runs += 1
            shutil.rmtree(folder)
        return count

    def _life_and_death(
        self,
        folder: pathlib.Path,
        chance: random.Random,
        seconds: float,
        kills: int,
        count: Count,
    ) -> bool:
        """One life; whether it was killed."""
        life = self.life(folder)
        count.lives += 1
        victim = chance.randrange(self._kind.processes)
        enough = count.phases.total() == kills
        try:
            life.reach("restoring")
        except RuntimeError as error:
            # JAX gives them 30 seconds, which are few on a busy machine.
            if "Gloo context initialization failed" not in str(error):
                raise
            count.late += 1
            return True
        aim = chance.choice([None, *PHASES[1:-1]])
        # What is ending has nothing to lose, and a life has its first phases once.
        delay = 0.0 if aim in PHASES[1:3] else chance.uniform(0, seconds)
        ends = enough or life.wait(delay, "ending")
        if ends or (aim and not life.catch(victim, aim)):
            life.reach(None)
            return False
        time.sleep(chance.uniform(0, 0.005) if aim else 0)
        life.kill(victim)
        count.phases[life.phase(victim)] += 1
        return True
