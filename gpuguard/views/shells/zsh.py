"""The completion script for zsh, a file _gpuguard in a directory of $fpath: zsh's own _arguments does the parsing."""

from __future__ import annotations

from collections.abc import Sequence

from gpuguard.views.shells import DIRECTORY, FILE, JOB, TEXT, WORDS, ShellCommand, ShellWord, quoted

_SCRIPT = r"""#compdef gpuguard
# Completion of gpuguard for zsh, by `gpuguard completion zsh` of gpuguard @VERSION@.
# As a file named _gpuguard in a directory of $fpath.

# What only this moment knows: $1 the kind, $2 what it is called.
_gpuguard_ask() {
    local line
    local -a ask values shown
    ask=($_gpuguard_program completion --values $1 -- "$PREFIX")
    for line in ${(f)"$(_call_program $1 ${(q)ask[@]} 2>/dev/null </dev/null)"}; do
        values+=("${line%%$'\t'*}")
        shown+=("${line/$'\t'/  -- }")
    done
    (( $#values )) || { _message -e $1 $2; return 1 }
    compadd -V $1 -l -d shown -a values
}

@FUNCTIONS@

_gpuguard() {
    local _gpuguard_program=${(Q)~words[1]}
    (( $+commands[$_gpuguard_program] )) || [[ -x $_gpuguard_program ]] || _gpuguard_program=gpuguard
    _gpuguard_command
}

# As a file of $fpath this runs when it is asked for; with eval it only registers.
if [[ $funcstack[1] == _gpuguard ]]; then
    _gpuguard "$@"
else
    compdef _gpuguard gpuguard
fi
"""

_FUNCTION = """{name}() {{
    local curcontext=$curcontext state line
    typeset -A opt_args
    _arguments -S -s {specs}
{more}}}"""

_DISPATCH = """    case $state in
        command)
            local -a found=({purposes})
            _describe -t commands command found
            ;;
        rest)
            case $line[1] in
{cases}
            esac
            ;;
    esac
"""


def script(commands: Sequence[ShellCommand], version: str) -> str:
    """The script."""
    functions = "\n\n".join(map(_function, commands))
    return _SCRIPT.replace("@VERSION@", version).replace("@FUNCTIONS@", functions)


def _name(path: Sequence[str]) -> str:
    return "_".join(("_gpuguard_command", *path)).replace("-", "_")


def _function(command: ShellCommand) -> str:
    specs = [_option(word) for word in command.options()]
    more = ""
    if command.commands:
        specs += ["'1:command:->command'", "'*::argument:->rest'"]
        purposes = " ".join(quoted(f"{name}:{_plain(what)}") for name, what in command.commands)
        cases = "\n".join(f"                {name}) {_name((*command.path, name))} ;;" for name, _ in command.commands)
        more = _DISPATCH.format(purposes=purposes, cases=cases)
    else:
        specs += [_positional(number, word) for number, word in enumerate(command.positionals(), 1)]
    before = " \\\n        "
    lead = "-C " if command.commands else ""
    return _FUNCTION.format(name=_name(command.path), specs=lead + before + before.join(specs), more=more)


def _option(word: ShellWord) -> str:
    purpose = _escaped(word.purpose)
    value = "" if word.kind is None else f"{':' * (1 + word.optional)}{_escaped(word.name)}:{_action(word)}"
    specs = []
    for flag in word.flags:
        glue = "" if word.kind is None else "=" if flag.startswith("--") else "+"
        if word.optional:
            glue = "=-" if flag.startswith("--") else "-"
        specs.append(quoted(f"*{flag}{glue}[{purpose}]{value}"))
    return " ".join(specs)


def _positional(number: int, word: ShellWord) -> str:
    if word.kind == JOB:
        return "'(-)*::command:_normal'"
    place = "*" if word.many else f"{number}"
    return quoted(f"{place}:{':' * word.optional}{_escaped(word.name)}:{_action(word)}")


def _action(word: ShellWord) -> str:
    if word.kind == WORDS:
        return f"({' '.join(word.words)})"
    actions = {TEXT: " ", FILE: "_files", DIRECTORY: "_files -/"}
    # The space: call it with these words, none of _arguments' own before them.
    return actions.get(word.kind or TEXT, f" _gpuguard_ask {word.kind} {_escaped(word.name)}")


def _plain(text: str) -> str:
    return text.replace(":", "\\:")


def _escaped(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text
