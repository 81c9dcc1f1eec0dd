"""The completion script for bash >= 4.2, with or without the package bash-completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuguard.views.shells import ShellCommand, quoted

_SCRIPT = r"""# Completion of gpuguard for bash, by `gpuguard completion bash` of gpuguard @VERSION@.
#   eval "$(gpuguard completion bash)"      in ~/.bashrc, or as a file:
#   gpuguard completion bash > ~/.local/share/bash-completion/completions/gpuguard

# What may stand behind a command: sets commands, flags, and positionals (kinds, the last one again and again with *).
_gpuguard_command() {
    commands= flags= positionals=
    case $1 in
@COMMANDS@
    esac
}

# The kind of the value of an option, with ? when it may be missing; "" when there is none.
_gpuguard_kind() {
    kind=
    case $1 in
@KINDS@
    esac
}

# The words of a kind that never change.
_gpuguard_words() {
    words=
    case $1 in
@WORDS@
    esac
}

# COMPREPLY for a value: its kind, what it completes (command and option or place), what is typed of it, what stays.
_gpuguard_value() {
    local kind=$1 of=$2 value=$3 before=$4 words word purpose
    local -a found=() shown=()
    case $kind in
        text) return ;;
        file) compopt -o filenames; mapfile -t found < <(compgen -f -- "$value") ;;
        directory) compopt -o filenames; mapfile -t found < <(compgen -d -- "$value") ;;
        words) _gpuguard_words "$of"; mapfile -t found < <(compgen -W "$words" -- "$value") ;;
        *)
            while IFS=$'\t' read -r word purpose; do
                found+=("$word")
                shown+=("$word${purpose:+  ($purpose)}")
            done < <("$program" completion --values "$kind" -- "$value" 2>/dev/null </dev/null)
            # Several: readline lists them and inserts only what all begin with, so it can show the purpose too.
            ((${#found[@]} > 1)) && [[ $COMP_TYPE != 37 && $COMP_TYPE != 42 ]] && found=("${shown[@]}")
            ;;
    esac
    for word in "${found[@]}"; do COMPREPLY+=("$before$word"); done
}

_gpuguard_job() {
    if declare -F _comp_command_offset >/dev/null; then _comp_command_offset "$1"
    elif declare -F _command_offset >/dev/null; then _command_offset "$1"
    elif ((COMP_CWORD == $1)) && [[ ${COMP_WORDS[COMP_CWORD]} != */* ]]; then
        mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}")
    else
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}

_gpuguard() {
    local program=${COMP_WORDS[0]/#\~/$HOME} token=${COMP_WORDS[COMP_CWORD]}
    local commands flags positionals kind path= awaits= of= word current last glued=0 place=0 i
    local -a typed=() at=() kinds=()
    COMPREPLY=()
    type -P "$program" >/dev/null || program=gpuguard  # an alias

    # The words as gpuguard gets them: bash splits at = and : too.
    for ((i = 1; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((${#typed[@]})) && { ((glued)) || [[ $word =~ ^[=:]+$ ]]; }; then
            typed[${#typed[@]} - 1]+=$word
        else
            typed+=("$word") at+=("$i")
        fi
        [[ $word =~ ^[=:]+$ ]] && glued=1 || glued=0
    done
    last=$((${#typed[@]} - 1)) current=${typed[${#typed[@]} - 1]}
    [[ $token =~ ^[=:]+$ ]] && token=

    _gpuguard_command ""
    for ((i = 0; i < last; i++)); do
        word=${typed[i]}
        if [[ -n $awaits && ! ($awaits == *\? && $word == -*) ]]; then
            awaits=
            continue
        fi
        awaits= kinds=($positionals)
        if [[ $word == -- ]]; then
            if [[ " ${kinds[*]}" == *" job"* ]]; then _gpuguard_job "${at[i + 1]}"; return; fi
        elif [[ $word == -* ]]; then
            _gpuguard_kind "$path $word"
            awaits=$kind of="$path $word"
        elif [[ " $commands " == *" $word "* ]]; then
            path+="${path:+ }$word" place=0
            _gpuguard_command "$path"
        elif [[ ${kinds[place]} == job ]]; then
            _gpuguard_job "${at[i]}"
            return
        else
            [[ ${kinds[place]} == *\* ]] || ((place++))
        fi
    done

    kinds=($positionals)
    if [[ -n $awaits && ! ($awaits == *\? && $current == -*) ]]; then
        _gpuguard_value "${awaits%\?}" "$of" "$current" ""
    elif [[ $current == --*=* ]]; then
        _gpuguard_kind "$path ${current%%=*}"
        [[ -z $kind ]] || _gpuguard_value "${kind%\?}" "$path ${current%%=*}" "${current#*=}" "${current%%=*}="
    elif [[ $current == -* || (-z $current && (${kinds[place]} == job || -z $commands${kinds[place]})) ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$current")
    elif [[ ${kinds[place]} == job ]]; then
        _gpuguard_job "${at[last]}"
    elif [[ -n $commands ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$current")
    elif [[ -n ${kinds[place]} ]]; then
        _gpuguard_value "${kinds[place]%\*}" "$path" "$current" ""
    fi
    # bash replaces only what stands behind the last = or : of the word.
    for i in "${!COMPREPLY[@]}"; do
        [[ ${typed[last]} == "$token" ]] || COMPREPLY[i]=${COMPREPLY[i]:${#current} - ${#token}}
    done
}

complete -F _gpuguard gpuguard
"""


def script(commands: Sequence[ShellCommand], version: str) -> str:
    """The script."""
    filled = {
        "@VERSION@": version,
        "@COMMANDS@": "\n".join(map(_command, commands)),
        "@KINDS@": "\n".join(_kinds(commands)),
        "@WORDS@": "\n".join(_words(commands)),
    }
    text = _SCRIPT
    for name, value in filled.items():
        text = text.replace(name, value)
    return text


def _command(command: ShellCommand) -> str:
    positionals = " ".join(f"{word.kind}{'*' * word.many}" for word in command.positionals())
    flags = " ".join(flag for word in command.options() for flag in word.flags)
    followers = " ".join(name for name, _ in command.commands)
    fields = {"commands": followers, "flags": flags, "positionals": positionals}
    set_ = " ".join(f"{name}={quoted(value)}" for name, value in fields.items() if value)
    return f"        {quoted(' '.join(command.path))}) {set_} ;;"


def _kinds(commands: Iterable[ShellCommand]) -> list[str]:
    """One case per kind."""
    options: dict[str, list[str]] = {}
    for command in commands:
        for word in command.options():
            if word.kind is not None:
                kind = word.kind + "?" * word.optional
                options.setdefault(kind, []).extend(f"{' '.join(command.path)} {flag}" for flag in word.flags)
    return [f"        {'|'.join(map(quoted, names))}) kind={quoted(kind)} ;;" for kind, names in options.items()]


def _words(commands: Iterable[ShellCommand]) -> list[str]:
    options: dict[str, list[str]] = {}
    for command in commands:
        for word in command.words:
            if word.words:
                path = " ".join(command.path)
                places = [f"{path} {flag}" for flag in word.flags] or [path]
                options.setdefault(" ".join(word.words), []).extend(places)
    return [f"        {'|'.join(map(quoted, names))}) words={quoted(words)} ;;" for words, names in options.items()]
