# What the generated script lacks: values with their purpose from `gpuguard completion --values`, the words of the job,
# and --option=value.
function _gpuguard_values  # kind
    set -l program (commandline -opc)[1]
    type -q -- $program; or set program gpuguard
    type -q -- $program; or return
    set -l word (string replace -r -- '^--[^=]*=' '' (commandline -ct))
    command $program completion --values $argv[1] -- "$word" 2>/dev/null </dev/null
end
function _gpuguard_job
    set -l words (commandline -opc)
    # Behind --, or as many words as there are that are no options of ours.
    set -l first (math (count $words) - $_shtab_gpuguard_npos + 1)
    contains -- -- $words; and set first (math (contains -i -- -- $words) + 1)
    set -l current (commandline -ct)
    if test $first -gt (count $words)
        complete -C "$current"
    else
        complete -C (string join ' ' -- (string escape -- $words[$first..-1]) "$current")
    end
end
