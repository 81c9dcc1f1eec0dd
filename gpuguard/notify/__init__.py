"""Notifications: the only place that sends messages.  Each kind of target is a file, and a frozen dataclass in TARGETS.

In a policy file each target has a name, and exactly one key that names its kind; below that are the fields of the
dataclass (``from_`` is written ``from``).  A single text stands for the first field, where that one takes a text:

    notify:
      ops:     {email: ops@example.org}
      owner:   {email: {to: $user@example.org, server: smtp.example.org, language: zh}}
      chat:    {webhook: {url: https://chat.example.org/hook, token: {file: /etc/gpuguard/token}}}
      program: {hook: {command: [/usr/local/bin/tell, --urgent]}}
      team:    {apprise: {url: {env: TEAM_CHAT}}}

A value that is wrong in itself is an InvalidRequest when the dataclass is made; problems() finds what only this machine
can tell.  Terminals are written to by actions; the texts are made by messages.
"""

from __future__ import annotations

from gpuguard.notify.apprise import Apprise
from gpuguard.notify.hook import Hook
from gpuguard.notify.mail import Email
from gpuguard.notify.secrets import Secret
from gpuguard.notify.sender import TARGETS, Sender, Target, problems
from gpuguard.notify.webhook import Webhook

__all__ = ["TARGETS", "Apprise", "Email", "Hook", "Secret", "Sender", "Target", "Webhook", "problems"]
