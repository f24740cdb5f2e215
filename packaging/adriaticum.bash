# Completions of adriaticum for bash.

# The words of the command so far, without options and their values.
_adriaticum_command() {
    local word skip=
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        if [[ $skip ]]; then
            skip=
        else
            case $word in
                --config | --permission | --expires | --concurrent | --budget | --state | --since | --until | --by | --key | --gateway | \
                    --through | --from | --to) skip=yes ;;
                -*) ;;
                *) echo "$word" ;;
            esac
        fi
    done
}

_adriaticum() {
    local words options files= word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    mapfile -t words < <(_adriaticum_command)
    options='--config --help --version'
    case "${words[0]} ${words[1]}" in
        ' ') options+=' serve keys usage backup restore move console audit search check' ;;
        'keys ') options+=' create list rename revoke set' ;;
        'keys create' | 'keys set') options+=' --permission --expires --concurrent --budget' ;;
        'keys list') options+=' --state --json' ;;
        'usage ') options+=' show verify --since --until --by --key --gateway --json --csv' ;;
        'usage show') options+=' --json' ;;
        'usage verify') options+=' --through --json' ;;
        'move ') options+=' --from --to' ;;
        'audit ') options+=' --since --json' ;;
        'console ') options+=' password' ;;
        'search ') options+=' add list remove query' ;;
        'search add' | 'search remove' | 'backup '* | 'restore '*) files=yes ;;
        'search list' | 'search query') options+=' --json' ;;
        'check ') options+=' --json' ;;
    esac
    case $before in
        --config | --from) options='' files=yes ;;
        --permission) options='completions metrics' files= ;;
        --by) options='hour day month key status gateway' files= ;;
        --expires) options='30d 90d 365d never' files= ;;
        --concurrent | --budget) options='none' files= ;;
        --state) options='active expiring expired revoked' files= ;;
        --key | --gateway | --through | --to) options='' files= ;;
        --since | --until) options='24h 7d 30d' files= ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
    if [[ $files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$word")
    fi
}

complete -F _adriaticum adriaticum
