"""Everything at once on one machine: jobs of three users, offenders, a guard that enforces, and death to each of them.

    sudo python benchmarks/chaos.py --seconds 100 --seed 7 --kind broker
    sudo python benchmarks/chaos.py --seconds 100 --seed 7 --amd

A simulated node of 8 devices, of NVIDIA or AMD; all processes, users, locks and signals are real.  What happens is
drawn from --seed, when it happens is the machine's.  The jobs (chaos_job.py) write down what gpuguard knows nothing
of, and at the end:

- nobody had a device together with another one, besides shares;
- who broke no rule got no signal but those that were sent from here;
- who broke one is gone, all jobs have come to their end, and the daemon lives;
- no lock, no record and no process is left, and nobody printed a traceback.

--variant plants a fault, which must be found: `unlocked` starts jobs past gpuguard, `harsh` has it end the innocent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from broker_machine import KEEPER, KINDS, Brokered
from nodes import remove
from proc import born_with, children_of
from users import identity, install

FIRST_UID, USERS = 20001, ("chaos1", "chaos2", "chaos3")
DEVICES, GIB = 8, 2**30
MOST_AT_ONCE = 40
SHORT = 20.0  # seconds: who breaks a rule is ended long before
END_SECONDS = 90.0  # a deaf job is killed 31 s after SIGTERM
LONG = 60.0  # the same for who is deaf to SIGTERM; a run must last so long that there is one
POLICY = """
version: 1
mode: enforce
interval: {shortest: 500ms, longest: 500ms}
policies:
  - name: hogs
    when: {memory: {above: ALLOWED}}
    for: 1s
    cooldown: 1s
    steps: [warn, terminate, {after: 31s, do: kill}]
  - {name: strangers, for: 3s, cooldown: 1s, when: {any: [{unclaimed: {}}, {trespass: {}}]}, steps: [warn, terminate]}
  - name: sleepers
    when: {age: {claim_without_process_above: 6s}}
    for: 1s
    cooldown: 1s
    steps: [warn, {after: 1s, do: release}]
"""
# What protects from a guard that ends too many is for hours; here hours are seconds.
DAEMON = """
import sys
from gpuguard.enforcement import guard_limits
guard_limits.VICTIMS_PER_HOUR = guard_limits.SIGNALS_PER_MINUTE = guard_limits.ENDED_PER_HOUR = 10**6
guard_limits.BETWEEN_ACTIONS, guard_limits.EFFECT_SECONDS = 1.0, 2.0
from gpuguard.cli import main
sys.exit(main(sys.argv[1:]))
"""
GRAB = """
import os, runpy, sys
import gpuguard
try:
    claim = gpuguard.grab_gpus(int(sys.argv.pop(1)), wait=3)
except gpuguard.GpuguardError as error:
    sys.exit(str(error))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OPTIONS = ("--no-wait", "--wait 10s", "--wait 4s --time-limit 20s", "--exec --no-wait", "--exec --wait 5s")
LOOKS = (
    "who",
    "who --json",
    "explain",
    "queue",
    "reserve",
    "select -n 2",
    "metrics",
    "top --once",
    "events --since 1m",
)
FAULTS = ("hang", "lost", "reset", "unlisted", "implausible")
# What is done how often, in parts of the whole.
OFTEN = {
    "innocent": 14, "sharer": 6, "grabber": 5, "hog": 2, "deaf": 1, "stranger": 2, "sleeper": 2, "look": 5, "adopt": 1,
    "release_of_others": 2, "release_own": 1, "administrate": 2, "keep": 1, "break_a_device": 2,
    "end_job": 3, "stop_job": 2, "end_wrapper": 4, "end_worker": 1, "end_daemon": 1, "freeze_daemon": 1,
}  # fmt: skip


class _Chaos:
    """The machine, and whoever breaks it."""

    def __init__(self, place: Path, site: Path, kind: str, args: argparse.Namespace) -> None:
        self.place, self.kind, self.variant, self.dice = place, kind, args.variant, random.Random(args.seed)
        self.machine = Brokered(place, site, kind, f"{DEVICES}x{'MI300X' if args.amd else 'H100-80GB'}")
        # What the variable of a job calls the devices.
        self.names = self.machine.uuids if args.amd else [str(number) for number in range(DEVICES)]
        deaf = args.seconds >= LONG
        self.machine.environment["GPUGUARD_DEBUG"] = "1"  # a fault inside gpuguard shows where
        self.users = [pwd.getpwnam(name) for name in USERS]
        # A daemon with a user of its own cannot end others.
        self.lasting = 5.0 if kind == "keeper" else LONG if deaf else SHORT
        self.often = OFTEN if deaf else {name: share for name, share in OFTEN.items() if name != "deaf"}
        if self.variant:
            self.often = {"innocent": 2, "sharer": 1}
        self.running: list[tuple[subprocess.Popen[bytes], str]] = []
        self.sent: dict[int, set[int]] = defaultdict(set)  # pid -> signals that came from here
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.truth, self.said = place / "truth", place / "said-by"
        for folder in (self.truth, self.said, place / "daemon"):
            folder.mkdir()
            folder.chmod(0o1777)
        for name in self.names:
            (self.truth / f"device.{name}").touch()
            (self.truth / f"device.{name}").chmod(0o666)
        shutil.copy(Path(__file__).with_name("chaos_job.py"), place)
        (place / "policy.yaml").write_text(POLICY.replace("ALLOWED", "1GiB" if self.variant == "harsh" else "60GiB"))
        self.broker = [] if kind == "everybody" else ["--broker"]

    def begin(self) -> None:
        self.machine.setup(*self.broker)
        self.start_daemon()

    def start_daemon(self) -> None:
        machine = self.machine
        options = ["--enforce", "--policy", str(self.place / "policy.yaml"), "--interval", "500ms"]
        environment = {name: value for name, value in machine.environment.items() if name != "PYTHONPATH"}
        environment["GPUGUARD_EVENTS"] = str(self.place / "daemon" / "events.jsonl")
        with (self.said / "daemon").open("a") as said:
            machine.daemon = subprocess.Popen(
                [machine.python_path, "-c", DAEMON, "daemon", *options], env=environment, stdin=subprocess.DEVNULL,
                stderr=said, start_new_session=True, cwd=machine.environment["PYTHONPATH"],
                **identity(KEEPER if self.kind == "keeper" else None),
            )  # fmt: skip

    def run(self, seconds: float) -> None:
        """Do one thing after the other."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.running = [one for one in self.running if one[0].poll() is None]
            if len(self.running) < MOST_AT_ONCE:
                (deed,) = self.dice.choices(list(self.often), list(self.often.values()))
                self.counts[deed.replace("_", " ")] += 1
                getattr(self, deed)()
            time.sleep(self.dice.expovariate(8))

    def spawn(self, user: pwd.struct_passwd | None, what: str, *words: str) -> None:
        number = len(list(self.said.iterdir()))
        with (self.said / f"{number}-{what}").open("w") as said:
            options: dict[str, Any] = {"stdout": said, "stderr": said, "start_new_session": True}
            self.running.append((subprocess.Popen(words, **options, **self.machine._as(user)), what))

    def gpuguard(self, user: pwd.struct_passwd | None, *words: str) -> None:
        self.spawn(user, words[0], *self.machine.words(*words))

    def anybody(self) -> pwd.struct_passwd:
        return self.dice.choice(self.users)

    # Jobs

    def job(self, role: str, options: str = "", memory: int = 20, seconds: float = 0.0, way: str = "whole") -> None:
        """Start one, with `gpuguard run` where there are options, else on a device of its own choice."""
        device = self.dice.choice(self.names)
        words = [self.machine.python_path, str(self.place / "chaos_job.py"), str(self.truth), role]
        words += [str(seconds or self.lasting), str(memory * GIB), way, "" if options else device]
        by = self.machine.words("run", *options.split(), "--") if options else []
        if options and self.variant == "unlocked":
            by = ["env", f"{'ROCR' if self.machine.uuids == self.names else 'CUDA'}_VISIBLE_DEVICES={self.names[0]}"]
        self.spawn(self.anybody(), role, *by, *words)

    def innocent(self) -> None:
        number = self.dice.choice((1, 1, 1, 2, 3))
        self.job("innocent", f"-n {number} {self.dice.choice(OPTIONS)}", seconds=self.dice.uniform(0.3, 6))

    def sharer(self) -> None:
        size = self.dice.choice((10, 20, 35))
        options = f"--share --memory {size + 1}GiB {self.dice.choice(OPTIONS)}"
        self.job("innocent", options, memory=size, seconds=self.dice.uniform(0.3, 6), way="share")

    def grabber(self) -> None:
        words = [str(self.dice.choice((1, 2))), str(self.place / "chaos_job.py"), str(self.truth), "innocent"]
        words += [str(self.dice.uniform(0.3, 4)), str(10 * GIB), "whole", ""]
        self.spawn(self.anybody(), "grab_gpus", self.machine.python_path, "-c", GRAB, *words)

    def hog(self) -> None:
        self.job("hog", "--no-wait", memory=65)

    def deaf(self) -> None:
        self.job("deaf", "--no-wait", memory=65)

    def stranger(self) -> None:
        self.job("stranger", memory=5)

    def sleeper(self) -> None:
        self.job("sleeper", "--no-wait", seconds=self.dice.choice((2, 15)))

    # Commands

    def look(self) -> None:
        self.gpuguard(self.anybody(), *self.dice.choice(LOOKS).split())

    def adopt(self) -> None:
        if found := [pid for pid in self.living() if b"\0stranger\0" in self.command(pid)]:
            self.gpuguard(None, "adopt", str(self.dice.choice(found)))

    def release_of_others(self) -> None:
        answer = self.machine(None, "who", "--json").stdout
        claims = [claim for device in json.loads(answer)["devices"] for claim in device["claims"]]
        if found := [claim for claim in claims if claim["uid"] is not None]:
            claim = self.dice.choice(found)
            self.gpuguard(
                self.dice.choice([one for one in self.users if one.pw_uid != claim["uid"]]), "release", claim["id"]
            )

    def release_own(self) -> None:
        self.gpuguard(self.anybody(), "release")

    def keep(self) -> None:
        self.gpuguard(self.anybody(), "keep", "--for", "2s", "--reason", "chaos")

    def administrate(self) -> None:
        user, device = self.anybody().pw_name, self.dice.randrange(DEVICES)
        keeper = f"--daemon-user {KEEPER.pw_name}" if self.kind == "keeper" else ""
        told = (
            f"quarantine {device} --reason chaos", f"quarantine {device} --end", f"deny {user} --for 2s", "doctor",
            f"reserve -n 1 --for 5s --user {user}", f"reserve -n 2 --from in_2s --for 3s --user {user}",
            f"setup --dir {self.machine.environment['GPUGUARD_DIR']} {keeper} {' '.join(self.broker)}",
        )  # fmt: skip
        self.gpuguard(None, *(word.replace("_", " ") for word in self.dice.choice(told).split()))

    def break_a_device(self) -> None:
        device = str(self.dice.randrange(DEVICES))
        self.machine(None, "sim", "fault", "--device", device, self.dice.choice(FAULTS))
        time.sleep(self.dice.uniform(0.1, 2))
        self.machine(None, "sim", "fault", "--device", device, "none")

    # Deaths

    def living(self) -> list[int]:
        """The jobs that live."""
        pids = [int(log.stem) for log in self.truth.glob("*.log")]
        return [pid for pid in pids if str(self.truth).encode() in self.command(pid)]

    def command(self, pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    def send(self, pid: int, number: int) -> None:
        self.sent[pid].add(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def end_job(self) -> None:
        if living := self.living():
            self.send(self.dice.choice(living), self.dice.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))

    def stop_job(self) -> None:
        if living := self.living():
            with self.stopped(self.dice.choice(living)):
                time.sleep(self.dice.random())

    def end_wrapper(self) -> None:
        wrappers = [one for one, what in self.running if what in ("innocent", "hog", "deaf", "sleeper")]
        if wrappers:
            wrapper = self.dice.choice(wrappers).pid
            for pid in (wrapper, *children_of(wrapper)):  # it hands on what it gets, and --exec leaves no wrapper
                self.sent[pid] |= {signal.SIGTERM, signal.SIGHUP}
            self.send(wrapper, self.dice.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)))

    def end_worker(self) -> None:
        assert self.machine.daemon
        for pid in children_of(self.machine.daemon.pid):
            self.send(pid, signal.SIGKILL)

    def end_daemon(self) -> None:
        assert self.machine.daemon
        if (status := self.machine.daemon.poll()) is not None:
            self.faults.append(f"the daemon had ended with {status}")
        self.machine.kill_daemon(self.dice.choice((signal.SIGKILL, signal.SIGTERM)))
        time.sleep(self.dice.random())
        self.start_daemon()

    def freeze_daemon(self) -> None:
        assert self.machine.daemon
        with self.stopped(self.machine.daemon.pid):
            time.sleep(self.dice.uniform(0.1, 3))

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        self.send(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(pid, signal.SIGCONT)

    # The end

    def finish(self) -> None:
        """Nothing new comes: compare what is left, and what was written down, with what must be."""
        for number in range(DEVICES):
            self.gpuguard(None, "quarantine", str(number), "--end")
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and (self.living() or any(one.poll() is None for one, _ in self.running)):
            time.sleep(0.5)
        self.faults += [f"lives on: {self.command(pid)!r}, {self.log(pid)}" for pid in self.living()]
        self.faults += [f"runs on: {one.args!r}" for one, _ in self.running if one.poll() is None]
        for log in self.truth.glob("*.log"):
            self.faults += self.against(int(log.stem))
        time.sleep(2.0)  # of a daemon that looks each half second
        with self.machine.job(None):
            self.machine(None, "who", "--fresh")  # a daemon with a user of its own cannot remove records of the dead
        assert self.machine.daemon
        records = [path.name for path in Path(self.machine.directory.records).glob("claim.[!0]*")]
        left = {"locked": self.machine.locked(), "records": records, "the daemon ended": self.machine.daemon.poll()}
        self.faults += [f"{what}: {value}" for what, value in left.items() if value not in (None, [])]
        for said in self.said.iterdir():
            if "Traceback" in (text := said.read_text(errors="replace")) or "inside gpuguard" in text:
                self.faults.append(f"{said.name}: {text[-2000:]}")

    def log(self, pid: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.truth / f"{pid}.log").read_text().splitlines()]

    def against(self, pid: int) -> Sequence[str]:
        """What should not have happened to a job."""
        lines = self.log(pid)
        role = lines[0]["role"] if lines else "none"
        self.counts[f"{role}s that ran"] += 1
        foreign = {line["number"] for line in lines if line["what"] == "signal"} - self.sent[pid]
        self.counts[f"{role}s that were signalled by the guard"] += bool(foreign)
        overlaps = [f"two have device {line['device']}: {lines}" for line in lines if line["what"] == "overlap"]
        return [*overlaps, *([f"an innocent was signalled: {lines}"] if foreign and role == "innocent" else [])]

    def close(self) -> None:
        self.machine.close()
        for pid in born_with(f"GPUGUARD_DIR={self.machine.environment['GPUGUARD_DIR']}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="of chaos; then it takes a while until all is over"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, help="who gives the locks (default: by --seed)")
    parser.add_argument("--amd", action="store_true", help="on GPUs of AMD")
    parser.add_argument("--variant", choices=("unlocked", "harsh"))
    args = parser.parse_args()
    if os.geteuid():
        parser.error("there are users in it, so it needs root.")
    if USERS[0] not in Path("/etc/passwd").read_text():
        with_users(sys.argv)
    kind = args.kind or KINDS[args.seed % len(KINDS)]
    with contextlib.ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix="gpuguard-chaos-"))
        stack.callback(remove, place)
        place.chmod(0o755)
        (place / "site").mkdir()
        install(place / "site")
        chaos = _Chaos(place, place / "site", kind, args)
        stack.callback(chaos.close)
        chaos.begin()
        chaos.run(args.seconds)
        chaos.finish()
    print("\n".join([*(f"{count:5} {what}" for what, count in sorted(chaos.counts.items())), *chaos.faults]))
    print(f"{kind}: {sum(chaos.counts[deed.replace('_', ' ')] for deed in OFTEN)} deeds, {len(chaos.faults)} faults")
    return int(bool(chaos.faults))


def with_users(words: Sequence[str]) -> NoReturn:
    """Go on anew where our users have names: who has none is nobody to the guard, and is never signalled."""
    rows = [f"{name}:x:{uid}:{uid}::/nonexistent:/bin/false\n" for uid, name in enumerate(USERS, FIRST_UID)]
    descriptor, passwd = tempfile.mkstemp(prefix="gpuguard-chaos-passwd-")
    with open(descriptor, "w") as file:
        file.write(Path("/etc/passwd").read_text() + "".join(rows))
    os.chmod(passwd, 0o644)
    # No process of ours stays outside: ended there, it would end this one before it has cleaned up.
    bound = 'mount --bind "$1" /etc/passwd; failed=$?; rm "$1"; [ $failed = 0 ] || exit; shift; exec "$@"'
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", bound, "sh", passwd, sys.executable, *words])


if __name__ == "__main__":
    sys.exit(main())
