# Completions of adriaticum for fish.

# Whether the words of the command so far, without options, are these.
function __adriaticum_at
    set -l words
    set -l skip no
    for word in (commandline -opc)[2..]
        if test $skip = yes
            set skip no
            continue
        end
        switch $word
            case --config --permission --expires --concurrent --budget --state --since --until --by --key --gateway --through --from --to
                set skip yes
            case '-*'
            case '*'
                set -a words $word
        end
    end
    test "$words[1..2]" = "$argv"
end

complete -c adriaticum -f
complete -c adriaticum -l config -r -F -d 'Read the configuration from this file'
complete -c adriaticum -l help -d 'Print help'
complete -c adriaticum -l version -d 'Print the version'

complete -c adriaticum -n '__adriaticum_at' -a serve -d 'Run the service until SIGTERM or SIGINT'
complete -c adriaticum -n '__adriaticum_at' -a keys -d 'Create, list, change and revoke API keys'
complete -c adriaticum -n '__adriaticum_at' -a usage -d 'Sum up requests and tokens'
complete -c adriaticum -n '__adriaticum_at' -a backup -d 'Copy the database while the service runs'
complete -c adriaticum -n '__adriaticum_at' -a restore -d 'Replace the database with a backup'
complete -c adriaticum -n '__adriaticum_at' -a move -d 'Copy a SQLite database to PostgreSQL'
complete -c adriaticum -n '__adriaticum_at' -a console -d 'Set the password of the console'
complete -c adriaticum -n '__adriaticum_at' -a audit -d 'Print who changed what'
complete -c adriaticum -n '__adriaticum_at' -a search -d 'Manage the embedded index of documents'
complete -c adriaticum -n '__adriaticum_at' -a check -d 'Test every part that a completion needs'

complete -c adriaticum -n '__adriaticum_at keys' -a create -d 'Create an API key and print its secret once'
complete -c adriaticum -n '__adriaticum_at keys' -a list -d 'List the keys'
complete -c adriaticum -n '__adriaticum_at keys' -a rename -d 'Rename a key'
complete -c adriaticum -n '__adriaticum_at keys' -a revoke -d 'Revoke a key permanently'
complete -c adriaticum -n '__adriaticum_at keys' -a set -d 'Change permissions, expiry, concurrent requests or budget'
complete -c adriaticum -n '__adriaticum_at keys create' -l permission -x -a 'completions metrics' -d 'What the key may do'
complete -c adriaticum -n '__adriaticum_at keys create' -l expires -x -a '30d 90d 365d' -d 'When the key expires'
complete -c adriaticum -n '__adriaticum_at keys create' -l concurrent -x -d 'Requests processed at once'
complete -c adriaticum -n '__adriaticum_at keys create' -l budget -x -d 'Tokens per day or month'
complete -c adriaticum -n '__adriaticum_at keys set' -l permission -x -a 'completions metrics' -d 'What the key may do'
complete -c adriaticum -n '__adriaticum_at keys set' -l expires -x -a '30d 90d 365d never' -d 'When the key expires'
complete -c adriaticum -n '__adriaticum_at keys set' -l concurrent -x -a none -d 'Requests processed at once'
complete -c adriaticum -n '__adriaticum_at keys set' -l budget -x -a none -d 'Tokens per day or month'
complete -c adriaticum -n '__adriaticum_at keys list' -l state -x -a 'active expiring expired revoked' -d 'Only keys of this state'
complete -c adriaticum -n '__adriaticum_at keys list' -l json -d 'Print JSON'

complete -c adriaticum -n '__adriaticum_at usage' -a show -d 'Show one request'
complete -c adriaticum -n '__adriaticum_at usage' -a verify -d 'Find rows and sums that were changed, deleted or inserted'
complete -c adriaticum -n '__adriaticum_at usage' -l since -x -a '24h 7d 30d' -d 'Only requests since then'
complete -c adriaticum -n '__adriaticum_at usage' -l until -x -a '24h 7d 30d' -d 'Only requests before then'
complete -c adriaticum -n '__adriaticum_at usage' -l by -x -a 'hour day month key status gateway' -d 'Group by'
complete -c adriaticum -n '__adriaticum_at usage' -l key -x -d 'Only requests of this key'
complete -c adriaticum -n '__adriaticum_at usage' -l gateway -x -d 'Only requests of this gateway'
complete -c adriaticum -n '__adriaticum_at usage' -l json -d 'Print JSON'
complete -c adriaticum -n '__adriaticum_at usage' -l csv -d 'Print comma-separated values'
complete -c adriaticum -n '__adriaticum_at usage show' -l json -d 'Print JSON'
complete -c adriaticum -n '__adriaticum_at usage verify' -l through -x -d 'Check a head that was noted earlier'
complete -c adriaticum -n '__adriaticum_at usage verify' -l json -d 'Print JSON'

complete -c adriaticum -n '__adriaticum_at backup; or __adriaticum_at restore' -F
complete -c adriaticum -n '__adriaticum_at move' -l from -r -F -d 'The SQLite database'
complete -c adriaticum -n '__adriaticum_at move' -l to -x -d 'The URI of an empty PostgreSQL database'
complete -c adriaticum -n '__adriaticum_at console' -a password -d 'Set the password of the console'
complete -c adriaticum -n '__adriaticum_at audit' -l since -x -a '24h 7d 30d' -d 'Only changes since then'
complete -c adriaticum -n '__adriaticum_at audit' -l json -d 'Print JSON'

complete -c adriaticum -n '__adriaticum_at search' -a add -d 'Add files and folders'
complete -c adriaticum -n '__adriaticum_at search' -a list -d 'List the documents'
complete -c adriaticum -n '__adriaticum_at search' -a remove -d 'Remove a document'
complete -c adriaticum -n '__adriaticum_at search' -a query -d 'Show what the index finds'
complete -c adriaticum -n '__adriaticum_at search add; or __adriaticum_at search remove' -F
complete -c adriaticum -n '__adriaticum_at search list; or __adriaticum_at search query' -l json -d 'Print JSON'

complete -c adriaticum -n '__adriaticum_at check' -l json -d 'Print JSON'
