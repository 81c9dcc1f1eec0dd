"""`%load_ext gpuguard` in a notebook: GPUs for its kernel, claimed before the first cell that uses CUDA.

%gpus 2                     two free GPUs for this kernel, or the reason why there are none; run again, it shows them
%gpus 1 --min-free 20GiB    with the options of `gpuguard run` that say which GPUs
%gpus 2 --wait 10m          in the queue for ten minutes at most; --wait alone: without end
%gpus                       what this kernel has, and who has the others
%gpus release               give them back, if CUDA does not run yet

The claim ends with the kernel: a restart gives the GPUs back, closing the browser does not.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gpuguard import api, device_state
from gpuguard.backends import is_simulated
from gpuguard.claims.claim import Claim
from gpuguard.cli.options import Parser, add_choice_options, add_source_options, quantity, request_of
from gpuguard.cli.run import PRIORITY_NAMES
from gpuguard.errors import ClaimLost, CudaInitialized, GpuguardError, ImpossibleRequest, InvalidRequest, NotEnoughGpus
from gpuguard.locale import N_, _, translated, use_english, use_language_of_user
from gpuguard.procfs import process_facts
from gpuguard.request import Request
from gpuguard.sanitize import neutralise
from gpuguard.tables import escaped, html_of_held_claim
from gpuguard.units import parse_duration
from gpuguard.views import who

_FOR_EVER = "for ever"  # --wait without a duration
_RESTART = N_("Restart the kernel")


@dataclass(frozen=True)
class NotebookClaim:
    """The claim of this kernel, and the words by which it was made."""

    claim: Claim
    words: tuple[str, ...]
    source: Mapping[str, str | None]  # backend and directory
    context: AbstractContextManager[Claim]  # its exit releases the claim and restores os.environ


_held: list[NotebookClaim] = []  # at most one


def load_ipython_extension(shell: Any) -> None:
    """Register %gpus.  IPython calls this for `%load_ext gpuguard`."""
    from IPython.core.error import UsageError  # shown without a traceback; the cell and `run all` fail all the same

    def gpus(line: str) -> None:
        use_language_of_user()
        try:
            run_line(shell, line)
        except GpuguardError as error:
            raise UsageError("\n".join(map(neutralise, translated(str(error)).splitlines()))) from None
        finally:
            use_english()  # as in any other program that imports gpuguard

    gpus.__doc__ = __doc__
    shell.register_magic_function(gpus, "line", "gpus")


def run_line(shell: Any, line: str) -> None:
    """Carry out the words behind %gpus."""
    try:
        words = shlex.split(line)
    except ValueError as fault:
        raise InvalidRequest(_("%gpus {line}: {fault}.").format(line=line, fault=fault)) from None
    if not words:
        _show_all(shell)
        return
    try:
        args = parser().parse_args(words)
    except SystemExit:  # --help
        return
    if args.what == "release":
        _release()
        return
    if args.what is not None:
        if not args.what.isdecimal() or args.num_gpus is not None:
            raise InvalidRequest(_("{what!r}?  Write `%gpus 2`, `%gpus` or `%gpus release`.").format(what=args.what))
        args.num_gpus = args.what
    if (held := _current()) is None:
        held = _claimed(args, tuple(words))
        _held.append(held)
        if held.claim.warning:
            print(neutralise(translated(held.claim.warning)))
    elif held.words != tuple(words):
        how = _(_RESTART) if api.cuda_runs() else _("Run `%gpus release`")
        text = _("this kernel has {gpus} already.  {how} first, to have others.")
        raise InvalidRequest(text.format(gpus=_names(held.claim), how=how))
    _publish(shell, *_card(held))


def parser() -> Parser:
    """Return the parser of the words behind %gpus."""
    parser = Parser(prog="%gpus", description=__doc__)
    parser.add_argument("what", metavar="N|release", nargs="?", help="how many GPUs (default: 1), or give them back")
    add_choice_options(parser)
    group = parser.add_argument_group("the claim")
    group.add_argument(
        "--wait",
        metavar="DURATION",
        nargs="?",
        const=_FOR_EVER,
        help="wait in the queue at most so long, as in 30m; without a duration: without end (default: do not wait)",
    )
    group.add_argument(
        "--priority", choices=PRIORITY_NAMES, default="normal", help="class in the queue (default: normal)"
    )
    group.add_argument("--note", metavar="TEXT", help="what it is for (default: the name of the notebook)")
    add_source_options(parser)
    return parser


def _claimed(args: Any, words: tuple[str, ...]) -> NotebookClaim:
    request, plain = request_of(args), vars(Request())
    conditions = {name: value for name, value in vars(request).items() if value != plain[name] and name != "num_gpus"}
    wait = None if args.wait == _FOR_EVER else quantity("--wait", args.wait, parse_duration) or 0.0
    source = {"backend": args.backend, "directory": args.dir}
    context = api.claim(
        request.num_gpus,
        wait=wait,
        priority=args.priority,
        on_wait=lambda error: print(_("waiting:"), neutralise(translated(error.headline)), flush=True),
        note=args.note or api.notebook_note(),
        **source,
        **conditions,
    )
    try:
        return NotebookClaim(context.__enter__(), words, source, context)
    except CudaInitialized:
        text = _(
            "CUDA runs in this kernel already, on the GPUs that it saw then.  {restart}, and run `%gpus {words}` "
            "before the first cell that uses CUDA."
        )
        raise CudaInitialized(text.format(restart=_(_RESTART), words=shlex.join(words))) from None
    except NotEnoughGpus as error:
        if args.wait is None and not isinstance(error, ImpossibleRequest):
            advice = _("`%gpus {words} --wait 10m` waits for them in the queue.").format(words=shlex.join(words))
            error.args = (f"{translated(str(error))}\n{advice}", *error.args[1:])
        raise


def _current() -> NotebookClaim | None:
    """Return what this kernel has claimed, or None if it has nothing."""
    if not _held:
        return None
    try:
        _held[0].claim.reassert()
    except ClaimLost as lost:
        _held.pop().context.__exit__(None, None, None)
        text = _("{lost}\nThis kernel has no GPUs now.  {restart} and claim again.")
        raise ClaimLost(text.format(lost=translated(str(lost)), restart=_(_RESTART))) from None
    return _held[0]


def _release() -> None:
    held = _current()
    if held is None:
        raise InvalidRequest(_("this kernel has no GPUs to give back.  `%gpus` shows who has which."))
    if api.cuda_runs():
        text = _(
            "CUDA runs in this kernel and keeps memory on {gpus} until it ends.  {restart}: that gives the GPUs back."
        )
        raise CudaInitialized(text.format(gpus=_names(held.claim), restart=_(_RESTART)))
    _held.pop().context.__exit__(None, None, None)
    print(_("{gpus}: given back.").format(gpus=_names(held.claim)))


def _show_all(shell: Any) -> None:
    text = _("this kernel has no GPUs: `%gpus 1` claims one.")
    html = f"<p>{escaped(text)}</p>"
    if held := _current():
        text, html = _card(held)
    machine = api.who(**(held.source if held else {}))
    lines = who.to_text(machine, device_state.uses(machine, process_facts(machine)))
    _publish(shell, "\n".join([text, *lines]), html + machine._repr_html_())


def _publish(shell: Any, text: str, html: str) -> None:
    shell.display_pub.publish({"text/plain": text, "text/html": html})


def _card(held: NotebookClaim) -> tuple[str, str]:
    simulated = is_simulated(held.source["backend"] or "")
    # A name that the request did not need was not read, for example for a single device.  Then it is left out.
    models = ", ".join(dict.fromkeys(device.name for device in held.claim if device.name))
    parts = [
        _names(held.claim),
        neutralise(models),
        _("claim {claim}").format(claim=held.claim.id),
        _("until the kernel ends"),
    ]
    text = ("SIMULATED " if simulated else "") + " · ".join(filter(None, parts))
    return text, ("<p><b>SIMULATED</b></p>" if simulated else "") + html_of_held_claim(held.claim)


def _names(claim: Claim) -> str:
    return f"GPU {', '.join(device.label for device in claim)}"
