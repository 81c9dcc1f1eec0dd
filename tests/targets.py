"""A verdict, the message about it, and targets that tests send it to."""

from __future__ import annotations

from builders import a_device, a_process, a_snapshot

from gpuguard.model import Finding, Subject, Verdict
from gpuguard.notify.mail import Email
from gpuguard.notify.secrets import Secret
from gpuguard.notify.templates import message_for

HOSTILE = [
    "; touch /tmp/x #",
    "a\nBcc: eve@example.org",
    "a\r\n\r\n.",
    "=?utf-8?q?x=0ABcc=3A_eve=40example.org?=",
    "=?utf-8?q?x=0D=0A=0D=0Aanother=20body?=",
    "=?utf-8?b?G1sySg==?=",
    "\x1b[2J",
    "\u202eexe",
    "%s%n",
    "${host}",
    "$why",
]
PASSWORD = "correct-horse-battery"


def a_verdict(process=None, **fields):
    process = process or a_process(pid=4711)
    subject = Subject("process", a_device(3).uuid, process.pid, process.start_time, process.uid, user=process.user)
    finding = Finding(fields.pop("rule", "idle"), subject, fields.pop("why", "utilization is 0%"), (process,))
    facts = {"policy": "idle-gpus", "action": "notify", "step": 1, "since": 10_000.0 - 7200, "enforce": True}
    return Verdict(finding=finding, **{**facts, **fields})


def a_message(language="en", **fields):
    return message_for(a_verdict(**fields), a_snapshot(a_device(3)), language)


def a_secret(tmp_path, text=PASSWORD, mode=0o400):
    path = tmp_path / "secret"
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return Secret(file=str(path))


def a_script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def by_smtp(server, to="ops@example.org", **fields):
    return Email(to, server="127.0.0.1", port=server.port, **{"security": "none"} | fields)


def a_fake_apprise(tmp_path, monkeypatch, answer="True"):
    place = tmp_path / "packages" / "apprise"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"""
import json
class NotifyFormat:
    TEXT = "text"
class Apprise:
    def add(self, url):
        self.url = url
        return url.startswith("chat://")
    def notify(self, **said):
        json.dump([self.url, said], open({str(tmp_path / "said")!r}, "w"))
        open({str(tmp_path / "command")!r}, "w").write(open("/proc/self/cmdline").read())
        print("leak", self.url)
        return {answer}
""")
    monkeypatch.syspath_prepend(str(place.parent))
