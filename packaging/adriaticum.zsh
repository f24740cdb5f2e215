#compdef adriaticum
# Completions of adriaticum for zsh.

_adriaticum() {
    local context state line
    local -a everywhere=(
        '--config[read the configuration from this file]:file:_files'
        '(- *)--help[print help]'
        '(- *)--version[print the version]'
    )
    _arguments -C $everywhere '1: :->command' '*:: :->rest' && return
    case $state in
        command)
            local -a commands=(
                'serve:run the service until SIGTERM or SIGINT'
                'keys:create, list, change and revoke API keys'
                'usage:sum up requests and tokens'
                'backup:copy the database while the service runs'
                'restore:replace the database with a backup'
                'move:copy a SQLite database to PostgreSQL'
                'console:set the password of the console'
                'audit:print who changed what'
                'search:manage the embedded index of documents'
                'check:test every part that a completion needs'
            )
            _describe command commands
            ;;
        rest)
            case "$line[1] $words[2]" in
                'keys create')
                    _arguments $everywhere '2:name:' \
                        '*--permission[what the key may do]:permission:(completions metrics)' \
                        '--expires[when the key expires]:when:(30d 90d 365d)' \
                        '--concurrent[requests processed at once]:number:' \
                        '--budget[tokens per day or month]:tokens/period:'
                    ;;
                'keys list')
                    _arguments $everywhere '--json[print JSON]' \
                        '--state[only keys of this state]:state:(active expiring expired revoked)'
                    ;;
                'keys rename') _arguments $everywhere '2:id:' '3:name:' ;;
                'keys set')
                    _arguments $everywhere '2:id:' \
                        '*--permission[what the key may do]:permission:(completions metrics)' \
                        '--expires[when the key expires]:when:(30d 90d 365d never)' \
                        '--concurrent[requests processed at once]:number:(none)' \
                        '--budget[tokens per day or month]:tokens/period:(none)'
                    ;;
                'keys revoke') _arguments $everywhere '2:id:' ;;
                'keys '*) _arguments $everywhere '1:command:(create list rename revoke set)' ;;
                'usage show') _arguments $everywhere '2:id:' '--json[print JSON]' ;;
                'usage verify')
                    _arguments $everywhere \
                        '--through[check a head that was noted earlier]:head:' '--json[print JSON]'
                    ;;
                'usage '*)
                    _arguments $everywhere '1:command:(show verify)' \
                        '--since[only requests since then]:when:(24h 7d 30d)' \
                        '--until[only requests before then]:when:(24h 7d 30d)' \
                        '--by[group by]:group:(hour day month key status gateway)' \
                        '--key[only requests of this key]:id:' \
                        '--gateway[only requests of this gateway]:name:' \
                        '(--csv)--json[print JSON]' \
                        '(--json)--csv[print comma-separated values]'
                    ;;
                'backup '*) _arguments $everywhere '1:new file:_files' ;;
                'restore '*) _arguments $everywhere '1:backup:_files' ;;
                'move '*)
                    _arguments $everywhere '--from[the SQLite database]:file:_files' \
                        '--to[the URI of an empty PostgreSQL database]:uri:'
                    ;;
                'console '*) _arguments $everywhere '1:command:(password)' ;;
                'audit '*)
                    _arguments $everywhere '--since[only changes since then]:when:(24h 7d 30d)' '--json[print JSON]'
                    ;;
                'search add') _arguments $everywhere '*:file or folder:_files' ;;
                'search list' | 'search query') _arguments $everywhere '--json[print JSON]' ;;
                'search remove') _arguments $everywhere '1:file or folder:_files' ;;
                'search '*) _arguments $everywhere '1:command:(add list remove query)' ;;
                'check '*) _arguments $everywhere '--json[print JSON]' ;;
                *) _arguments $everywhere ;;
            esac
            ;;
    esac
}

_adriaticum "$@"
