"""The completion script for fish >= 3.4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuguard.views.shells import DIRECTORY, FILE, JOB, OWN, TEXT, WORDS, ShellCommand, ShellWord

_SCRIPT = r"""# Completion of gpuguard for fish, by `gpuguard completion fish` of gpuguard @VERSION@:
#   gpuguard completion fish > ~/.config/fish/completions/gpuguard.fish

# Options whose value is the next word, and commands with commands: both with what stands before them.
set -g __gpuguard_valued @VALUED@
set -g __gpuguard_paths @PATHS@
set -g __gpuguard_starters @STARTERS@

# Sets __gpuguard_found: the command that is being typed ("policy check"), and behind it the words of its job, if they
# began.  Every condition below asks for it, so the line is read once.
function __gpuguard_read
    set -l line (commandline -pc)
    test "$line" = "$__gpuguard_line"; and return
    set -g __gpuguard_line $line
    set -l words (commandline -opc)[2..-1]
    set -l path
    set -l skip 0
    set -l place 0
    set -l behind
    for word in $words
        set place (math $place + 1)
        if test $skip = 1
            set skip 0
        else if test "$word" = --
            set behind $words[(math $place + 1)..-1] (commandline -ct)
            break
        else if string match -q -- '-*' $word
            contains -- "$path $word" $__gpuguard_valued; and set skip 1
        else if contains -- (string trim "$path $word") $__gpuguard_paths
            set path (string trim "$path $word")
        else if contains -- "$path" $__gpuguard_starters
            set behind $words[$place..-1] (commandline -ct)
            break
        end
    end
    if not set -q behind[1]; and test $skip = 0; and not string match -q -- '-*' (commandline -ct)
        set behind (commandline -ct)  # its first word
    end
    set -g __gpuguard_found "$path"
    set -q behind[1]; and contains -- "$path" $__gpuguard_starters; and set -a __gpuguard_found $behind
end

# Whether the command is $argv, and its job has not begun.
function __gpuguard_at
    __gpuguard_read
    test (count $__gpuguard_found) -le 1; and test "$__gpuguard_found[1]" = "$argv"
end

function __gpuguard_has_job
    __gpuguard_read
    test (count $__gpuguard_found) -gt 1
end

function __gpuguard_job
    set -l words $__gpuguard_found[2..-1]
    test (count $words) -eq 1; and complete -C "$words"
    or complete -C (string join ' ' -- (string escape -- $words[1..-2]) $words[-1])
end

# What only this moment knows: $argv[1] is the kind.
function __gpuguard_ask
    set -l program (commandline -opc)[1]
    type -q -- $program; or set program gpuguard
    type -q -- $program; or return
    set -l word (string replace -r '^--[^=]*=' '' -- (commandline -ct))
    command $program completion --values $argv[1] -- "$word" 2>/dev/null </dev/null
end

complete -c gpuguard -f
complete -c gpuguard -n __gpuguard_has_job -a '(__gpuguard_job)'
@LINES@
"""


def script(commands: Sequence[ShellCommand], version: str) -> str:
    """The script."""
    valued = [
        f"{' '.join(command.path)} {flag}"
        for command in commands
        for word in command.options()
        if word.kind is not None and not word.optional
        for flag in word.flags
    ]
    starters = [
        " ".join(command.path) for command in commands if any(word.kind == JOB for word in command.positionals())
    ]
    filled = {
        "@VERSION@": version,
        "@VALUED@": " ".join(map(_quoted, valued)),
        "@PATHS@": " ".join(_quoted(" ".join(command.path)) for command in commands if command.path),
        "@STARTERS@": " ".join(map(_quoted, starters)),
        "@LINES@": "\n".join(line for command in commands for line in _lines(command)),
    }
    text = _SCRIPT
    for name, value in filled.items():
        text = text.replace(name, value)
    return text


def _lines(command: ShellCommand) -> Iterator[str]:
    at = f"complete -c gpuguard -n {_quoted(f'__gpuguard_at {chr(32).join(command.path)}'.rstrip())}"
    for name, purpose in command.commands:
        yield f"{at} -a {name} -d {_quoted(purpose)}"
    for word in command.options():
        flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else _short(flag) for flag in word.flags)
        value = "" if word.kind is None else f" {_value(word)}"
        yield f"{at} {flags}{value} -d {_quoted(word.purpose)}"
    for word in command.positionals():
        if word.kind not in (JOB, TEXT):
            yield f"{at} {_value(word)}"


def _short(flag: str) -> str:
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


def _value(word: ShellWord) -> str:
    needed = "" if word.optional or not word.flags else "r"
    if word.kind == WORDS:
        return f"-{needed}fa {_quoted(' '.join(word.words))}"
    if word.kind not in OWN:
        return f"-{needed}fka '(__gpuguard_ask {word.kind})'"
    if word.kind == TEXT:
        return f"-{needed}f"
    if word.kind == DIRECTORY:
        return f"-{needed}fa '(__fish_complete_directories)'"
    return f"-{needed}F" if word.kind == FILE else ""


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
