# What the generated script lacks: values with their purpose from `gpuguard completion --values`, the words of the job,
# and --option=value.
_gpuguard_values() {  # kind
    local line
    local -a values shown program
    program=(${(Q)~_gpuguard_typed} completion --values $1 -- "$PREFIX")
    (( $+commands[$program[1]] )) || [[ -x $program[1] ]] || program[1]=gpuguard
    for line in ${(f)"$(_call_program $1 ${(q)program[@]} 2>/dev/null </dev/null)"}; do
        values+=("${line%%$'\t'*}")
        shown+=("${line/$'\t'/  -- }")
    done
    (( $#values )) || { _message -e $1 $1; return 1 }
    compadd -V $1 -l -d shown -a values
}
functions[_gpuguard_generated]=$functions[_shtab_gpuguard]
_shtab_gpuguard() {
    local _gpuguard_typed=$words[1]
    if [[ $PREFIX == --*=* ]]; then  # _arguments was told of --option value only
        words[CURRENT]=("${PREFIX%%=*}" "${PREFIX#*=}")
        compset -P 1 '*='
        (( CURRENT++ ))
    fi
    _gpuguard_generated "$@"
}
