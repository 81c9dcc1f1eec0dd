"""Notifications: the only place that sends messages.  Each kind of target is a frozen dataclass, a row of TARGETS.

In a policy file each target has a name, and exactly one key that names its kind; below that are the fields of the
dataclass (``from_`` is written ``from``).  A single text stands for the first field, where that one takes a text:

    notify:
      ops:     {email: ops@example.org}
      owner:   {email: {to: $user@example.org, server: smtp.example.org, user: gpuguard,
                        password: {file: /etc/gpuguard/smtp-password}, language: zh}}
      chat:    {webhook: {url: https://chat.example.org/hook, token: {file: /etc/gpuguard/token}}}
      program: {hook: {command: [/usr/local/bin/tell, --urgent]}}
      team:    {apprise: {url: {env: TEAM_CHAT}}}

Terminals are written to by actions.  Start reading at sender; texts are made by templates.
connections bounds time and bytes; what an answer of HTTP means (redirects) is in webhook.
"""
