"""Stays with a job of Ray: its output here, Ctrl-C to it, its exit code."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from contextlib import ExitStack

from gpuguard.cli.terminal import print_notice
from gpuguard.clusters.ray import PENDING, STOPPED, SUCCEEDED, Jobs, State
from gpuguard.errors import GpuguardError
from gpuguard.views.text import writable

POLL_SECONDS = 0.3
SILENT_SECONDS = 60.0  # for which the head of the cluster may be gone: it can be started again
TELL_SECONDS = 10.0  # after which somebody wonders why nothing happens
AT_ONCE_SECONDS = 15.0  # what --no-wait leaves to Ray, which needs some 2 s to start a job
ENDS_IT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

NOT_NOW, TIMED_OUT, FAILED = 75, 124, 125


def follow(jobs: Jobs, job: dict[str, object], wait: float | None, no_wait: bool) -> int:
    """Submit *job* and stay until it has ended; the exit code of its command, as of `gpuguard run`.

    Args:
        job: with the submission_id that it shall have: whoever is interrupted before Ray answers knows what to end.
        wait: seconds to be PENDING at most; None: for ever.
        no_wait: only as long as Ray needs to start anything.
    """
    name, signals = str(job["submission_id"]), list[int]()

    def noted(number: int, frame: object) -> None:
        signals.append(number)
        if len(signals) > 1:  # Ray's client waits for an answer without end
            raise KeyboardInterrupt

    with ExitStack() as stack:
        for signum in ENDS_IT:
            stack.callback(signal.signal, signum, signal.signal(signum, noted))
        try:
            jobs.submit(job)
            print_notice(f"Ray job {name}")
            # What comes before its entrypoint in the log is Ray's.
            output = Output(jobs, name, f"Running entrypoint for job {name}: {job['entrypoint']}\n")
            state = _watch(jobs, name, output, _deadline(wait, no_wait), signals)
            _finished(output)
        except BrokenPipeError:  # nobody reads it any more
            jobs.stop(name)
            raise
        except KeyboardInterrupt:
            print_notice(f"Ray may go on with the job: `ray job stop {name}` ends it.")
    if signals:
        return 128 + signals[0]
    if state.status == PENDING:
        print_notice(f"the job could not start in time.  {state.message}")
        return NOT_NOW if no_wait else TIMED_OUT
    return exit_code(state)


def exit_code(state: State) -> int:
    """The exit code for a job that is over."""
    code = state.exit_code
    if state.status == SUCCEEDED and code is None:
        return 0
    if code is None or not -65 < code < 256 or (code == 0) != (state.status == SUCCEEDED):
        if state.status == STOPPED:
            print_notice("somebody else had Ray end the job.")
            return 128 + signal.SIGTERM
        print_notice(f"Ray could not run the job: {state.message.strip() or state.status}")
        return FAILED
    return code if code >= 0 else 128 - code


def _deadline(wait: float | None, no_wait: bool) -> float | None:
    return None if wait is None else time.monotonic() + (AT_ONCE_SECONDS if no_wait else wait)


def _finished(output: Output) -> None:
    try:
        output.finish()
    except GpuguardError as error:  # the job has ended all the same, and its exit code is known
        print_notice(f"the end of its output cannot be had: {error}")


def _watch(jobs: Jobs, name: str, output: Output, deadline: float | None, signals: list[int]) -> State:
    """Show its output until it is over, or until it was to be started."""
    began = answered = time.monotonic()
    told = asked = stopped = False
    while True:
        output.show(POLL_SECONDS)
        now = time.monotonic()
        if signals and not asked:
            asked = True
            print_notice(f"asking Ray to end the job {name}.  Once more, and this ends without waiting for that.")
        try:
            state, answered = jobs.state(name), now
            late = state.status == PENDING and deadline is not None and now > deadline
            if (signals and not stopped) or late:
                jobs.stop(name)
                stopped = True
        except GpuguardError:  # also what stands before a head that starts again: 502, or a page
            if now - answered > SILENT_SECONDS:
                print_notice(f"nothing is known of the job {name}, which may go on: `ray job stop {name}` ends it.")
                raise
            continue
        if state.is_over or late:
            return state
        if state.status == PENDING and not told and now - began > TELL_SECONDS:
            told = True
            print_notice(f"waiting for Ray.  {state.message}")


class Output:
    """What the job says, each word of it once, though the connection may break.

    Args:
        marker: the last line of Ray's own before it.
    """

    def __init__(self, jobs: Jobs, name: str, marker: str) -> None:
        self._jobs, self._name, self._marker = jobs, name, marker
        self._chunks: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._head: str | None = ""  # until the marker was there
        self._seen = 0  # characters of the log
        self._thread = self._listen()

    def _listen(self) -> threading.Thread:
        def listen(skip: int) -> None:
            for chunk in self._jobs.tail(self._name):
                if rest := chunk[skip:]:
                    self._chunks.put(rest)
                skip = max(0, skip - len(chunk))

        thread = threading.Thread(target=listen, args=(self._seen,), daemon=True, name="gpuguard-ray-log")
        thread.start()
        return thread

    def show(self, seconds: float) -> None:
        """What came, waiting at most so long for it."""
        try:
            while True:
                self._put(self._chunks.get(timeout=seconds))
                seconds = 0.0
        except queue.Empty:
            pass
        if not self._thread.is_alive() and self._chunks.empty():
            self._thread = self._listen()

    def finish(self) -> None:
        """The rest, now that all is said."""
        self._put(self._jobs.log(self._name)[self._seen :])
        if self._head:
            sys.stderr.write(self._head)  # it did not begin, and Ray says why

    def _put(self, text: str) -> None:
        self._seen += len(text)
        if self._head is not None:
            self._head += text
            _, found, text = self._head.partition(self._marker)
            if not found:
                return
            self._head = None
        sys.stdout.write(writable(text, sys.stdout))
        sys.stdout.flush()
