# What the generated script lacks: values with their purpose from `gpuguard completion --values`, the words of the job,
# and --option=value.
_gpuguard_values() {  # kind, word
    local program=${COMP_WORDS[0]/#\~/$HOME} value purpose
    local -a values=() shown=()
    type -P "$program" >/dev/null || program=gpuguard  # an alias
    while IFS=$'\t' read -r value purpose; do
        values+=("$value") shown+=("$value${purpose:+  ($purpose)}")
    done < <("$program" completion --values "$1" -- "$2" 2>/dev/null </dev/null)
    # Of several, readline inserts only what all begin with, and lists them: so they can show their purpose.
    ((${#values[@]} > 1)) && [[ $COMP_TYPE != 37 && $COMP_TYPE != 42 ]] && values=("${shown[@]}")
    ((${#values[@]} == 0)) || printf '%s\n' "${values[@]}"
}
_gpuguard_job() {  # the index of its first word
    if declare -F _comp_command_offset >/dev/null; then _comp_command_offset "$1"
    elif declare -F _command_offset >/dev/null; then _command_offset "$1"
    else
        local kind=-f
        ((COMP_CWORD == $1)) && [[ ${COMP_WORDS[COMP_CWORD]} != */* ]] && kind=-c
        mapfile -t COMPREPLY < <(compgen "$kind" -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}
_gpuguard_job_word() {
    _gpuguard_job "$current_action_args_start_index"
    ((${#COMPREPLY[@]} == 0)) || printf '%s\n' "${COMPREPLY[@]}"
}
_gpuguard() {
    local -a typed=("${COMP_WORDS[@]:0:COMP_CWORD+1}")
    local i
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [[ ${typed[i]} == -- && " @STARTERS@ " == *" ${typed[1]} "* ]]; then
            compopt -o filenames
            _gpuguard_job $((i + 1))
            return
        fi
    done
    # bash makes three words of --option=value.
    local -a COMP_WORDS=("${typed[0]}")
    for ((i = 1; i < ${#typed[@]}; i++)); do
        [[ ${typed[i]} == = && ${typed[i - 1]} == --* ]] || COMP_WORDS+=("${typed[i]}")
    done
    [[ ${typed[i - 1]} == = ]] && COMP_WORDS+=("")
    local COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _shtab_gpuguard
}
