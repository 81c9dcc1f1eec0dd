"""Two users who flood a machine with tickets and junk requests; `python tests/support/floods.py`: what others pay.

with flooded(broker, BOB, CAROL) as floods: ...     1,000 wordy tickets and 6 threads of junk requests for each of them
with flooded(broker, BOB, tickets=70, threads=0): ...

As a program, as root, it prints how long another user's `run -n 1 --no-wait -- true` takes beside the flood, beside the
same threads and files without gpuguard, and alone, in turns; and how long a policy's ladder of 4 s takes meanwhile.
"""

import argparse
import contextlib
import json
import pwd
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from broker_machine import Brokered, a_machine
from users import ALICE, BOB, a_site

CAROL, DAVE = pwd.getpwnam("sys"), pwd.getpwnam("man")
GLOBS, ALTERNATIVES = 16, 4  # the most that a ticket may have

# Tickets that any GPU could meet, each with other globs, whose wakers are read; and requests for all GPUs that none can
# meet.  "elsewhere": the same files in a directory of nobody, the same requests to a program that answers at once.
FLOOD = """
import resource, socket, socketserver, tempfile, threading
from dataclasses import replace
from gpuguard.claims.daemon_client import connect, encoded
from gpuguard.queue.tickets import OwnTicket
where, tickets, threads, globs, alternatives, *uuids = sys.argv[1:]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20000), hard))
place = directory
if where == "elsewhere":
    place = replace(directory, records=tempfile.mkdtemp())
held = []
for number in range(int(tickets)):
    wordy = [[f"*{number}{one}{glob}?[a-z]*" for glob in range(int(globs))] for one in range(int(alternatives))]
    wanted = [{"num_gpus": 1, "models": [*names[1:], "*"][: int(globs)]} for names in wordy]
    held.append(OwnTicket(place, {"schema": 1, "pid": os.getpid(), "requests": wanted}))
junk = encoded({"do": "claim", "devices": uuids, "conditions": {"max_util": 0.0}})
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.readline()
        self.wfile.write(encoded({"ok": True, "refused": {}}))
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads, request_queue_size = True, 64
if where == "elsewhere":
    path = place.records + "/socket"
    threading.Thread(target=Server(path, Answer).serve_forever, daemon=True).start()
def ask():
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(60)
                if where == "elsewhere":
                    connection.connect(path)
                else:
                    connect(connection, directory, 60)
                connection.sendall(junk)
                while connection.recv(65536):
                    pass
        except OSError:
            time.sleep(0.01)
for number in range(int(threads)):
    threading.Thread(target=ask, daemon=True).start()
print("floods", flush=True)
while True:
    for one in held:
        one.drain()
    time.sleep(0.5)
"""


@contextlib.contextmanager
def flooded(
    broker: Brokered,
    *users: pwd.struct_passwd,
    tickets: int = 1000,
    threads: int = 6,
    globs: int = GLOBS,
    alternatives: int = ALTERNATIVES,
    where: str = "here",
) -> Iterator[list[subprocess.Popen[str]]]:
    """Each of *users* floods the machine meanwhile."""
    words = (where, str(tickets), str(threads), str(globs), str(alternatives), *broker.uuids)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(broker.running(user, FLOOD, *words)) for user in users]


POLICY = """version: 1
policies:
  - name: no-claim
    when: {unclaimed: {}}
    mode: enforce
    for: 4s
    steps: [warn, {after: 4s, do: terminate}]
"""
USES = """
from gpuguard.backends import simulated
simulated.use("0", 2**30, 0.0, spec=sys.argv[1])
print("uses", flush=True)
time.sleep(600)
"""


def ladder(machine: Brokered, seconds: float = 60.0) -> tuple[float | None, int]:
    """Seconds until the last step of the policy is due against a new process, and notes of samples that came late.

    The users of the tests are the system's, so that step is refused.
    """
    node, log = machine.environment["GPUGUARD_BACKEND"].partition(":")[2], machine.place / "daemon" / "events.jsonl"
    began, due, late = time.time(), None, 0
    with machine.running(DAVE, USES, node):
        while due is None and time.time() < began + seconds:
            time.sleep(0.2)
            events = [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]
            events = [event for event in events if event["time_unix_seconds"] >= began]
            due = next((event["time_unix_seconds"] for event in events if event["kind"] == "terminate"), None)
            late = sum(event["outcome"] in ("resampling", "gap", "late") for event in events)
    return (due - began if due else None), late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--site", help="a directory with another version of gpuguard, to compare it")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        site = Path(options.site) if options.site else stack.enter_context(a_site())
        machine = stack.enter_context(a_machine(site, "broker", "8xH100-80GB"))
        machine.kill_daemon()
        policy = machine.place / "policy.yaml"
        policy.write_text(POLICY)
        machine.start_daemon("--policy", str(policy), "--enforce", "--interval", "1s")
        for round_number in range(options.rounds):
            for where in ("alone", "elsewhere", "here"):
                with contextlib.ExitStack() as flood:
                    if where != "alone":
                        flood.enter_context(flooded(machine, BOB, CAROL, where=where))
                    time.sleep(3.0)
                    for _ in range(options.runs):
                        begun = time.monotonic()
                        done = machine(ALICE, "run", "-n", "1", "--no-wait", "--", "true", timeout=300.0)
                        seconds.setdefault(where, []).append(time.monotonic() - begun)
                        if done.returncode:
                            print(f"{where}: {done.returncode} {done.stderr.strip()[-300:]}", flush=True)
                    print(round_number, where, [f"{one:.2f}" for one in seconds[where][-options.runs :]], flush=True)
                    print("  ladder: seconds, late samples:", ladder(machine), flush=True)
        print(machine.said()[-2000:])
    middle = {where: statistics.median(times) for where, times in seconds.items()}
    for where, value in middle.items():
        print(f"{where:<10} median {value:.2f} s, of {len(seconds[where])}, longest {max(seconds[where]):.2f} s")
    if middle.get("elsewhere"):
        print(f"here / elsewhere: {middle['here'] / middle['elsewhere']:.2f}")


if __name__ == "__main__":
    main()
