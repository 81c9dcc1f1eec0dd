"""Hosts of a fleet without a network: a program that stands in for ssh and answers what the test says.

hosts = Hosts(tmp_path); hosts.say("a", an_answer()); hosts.say("slow", waits=True); hosts("who", "--hosts", "a,slow")
"""

import json
import subprocess
from pathlib import Path

from builders import a_device, a_snapshot
from nodes import Gpuguard

from gpuguard.device_state import uses
from gpuguard.views import who
from gpuguard.views.text import json_text

# Answers with what stands in files named after the host; waits for HOST.go where there is a HOST.waits.
SSH = r"""
place=$1
while [ "$1" != -- ]; do shift; done
host=$2
echo $$ > "$place/$host.pid"
printf '%s\n' "$3" >> "$place/$host.asked"
while [ -e "$place/$host.waits" ] && [ ! -e "$place/$host.go" ]; do sleep 0.05; done
[ -e "$place/$host.err" ] && cat "$place/$host.err" >&2
[ -e "$place/$host.out" ] && cat "$place/$host.out"
[ -e "$place/$host.status" ] && exit "$(cat "$place/$host.status")"
exit 0
"""
# What a locked-down account refuses: command -> why.
REFUSED = {
    "": "no command, and there is no shell here",
    **dict.fromkeys(
        (
            "rm -rf /", "sh", "gpuguard", "gpuguard run -- touch owned", "who; touch owned",
            "scp -t /tmp", "internal-sftp", "gpuguard release 1", "gpuguard serve-ssh --ask who", "run -- reboot",
            "gpuguard top", "gpuguard web", "x" * 5000, "/bin/sh -c 'gpuguard who'", "who 'open",
        ),
        "this key is for",
    ),
    "who $(touch owned)": "unrecognized arguments: $(touch owned)",
    "who && touch owned": "unrecognized arguments: && touch owned",
    "who extra": "unrecognized arguments: extra",
    "select --json --no-such-option": "unrecognized arguments: --no-such-option",
    "gpuguard who --backend replay:/etc/passwd": "--backend is not answered",
    "gpuguard who --dir=/": "--dir is not answered",
    "who --watch": "--watch is not answered",
    "gpuguard who --hosts -oProxyCommand=touch": "--hosts: a value is missing",
    "gpuguard queue --hosts localhost": "--hosts is not answered",
    "queue --hosts-file=/etc/passwd": "--hosts-file is not answered",
    "report --html /etc/passwd": "--html is not answered",
    "report --hosts localhost": "--hosts is not answered",
    "who --ssh reboot --hosts a": "is not answered",
    "select -sX": "--sep is not answered",
    "select -S -n 2 -O uuid": "--format is not answered",
    "who --help": "--help is not answered",
    "select -hn 2": "--help is not answered",
}  # fmt: skip
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egpj\n\r<b>$(reboot)`id`"


class Hosts:
    """What each host says."""

    def __init__(self, place: Path) -> None:
        self.place = place / "hosts"
        self.place.mkdir()
        (self.place / "ssh").write_text(SSH)
        self.gpuguard = Gpuguard(place, None)

    @property
    def ssh(self) -> str:
        return f"sh {self.place}/ssh {self.place}"

    def say(self, host: str, out: object = "", *, err: str = "", status: int = 0, waits: bool = False) -> None:
        text = out if isinstance(out, str) else json.dumps(out)
        (self.place / f"{host}.out").write_text(text, "utf-8", "surrogatepass")
        (self.place / f"{host}.err").write_text(err)
        (self.place / f"{host}.status").write_text(str(status))
        if waits:
            (self.place / f"{host}.waits").touch()

    def go(self, host: str) -> None:
        (self.place / f"{host}.go").touch()

    def asked(self, host: str) -> list[str]:
        return (self.place / f"{host}.asked").read_text().splitlines()

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.gpuguard(*words, "--ssh", self.ssh)


def an_answer(*devices: object, **more: object) -> dict[str, object]:
    snapshot = a_snapshot(*(devices or (a_device(0, processes=()),)))
    content: dict[str, object] = json.loads(json_text(who.to_json(snapshot, uses(snapshot))))
    return {**content, **more}
