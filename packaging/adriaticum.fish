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
            case --config --permission --expires --since --until --by
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
complete -c adriaticum -l help -d 'Tell more; after a command, about it'
complete -c adriaticum -l version -d 'Print the version'

complete -c adriaticum -n '__adriaticum_at' -a serve -d 'Run the service until SIGTERM or SIGINT'
complete -c adriaticum -n '__adriaticum_at' -a keys -d 'Make, list, rename and revoke API keys'
complete -c adriaticum -n '__adriaticum_at' -a usage -d 'Tell what the ledger holds'
complete -c adriaticum -n '__adriaticum_at' -a backup -d 'Make a consistent copy of the database while it is used'
complete -c adriaticum -n '__adriaticum_at' -a console -d 'Set the password of the console'
complete -c adriaticum -n '__adriaticum_at' -a search -d 'Keep the embedded index of documents'
complete -c adriaticum -n '__adriaticum_at' -a check -d 'Try every part that a completion needs'

complete -c adriaticum -n '__adriaticum_at keys' -a create -d 'Make an API key and print its secret, once'
complete -c adriaticum -n '__adriaticum_at keys' -a list -d 'List the keys'
complete -c adriaticum -n '__adriaticum_at keys' -a rename -d 'Give a key another name'
complete -c adriaticum -n '__adriaticum_at keys' -a revoke -d 'Refuse a key from now on, for good'
complete -c adriaticum -n '__adriaticum_at keys create' -l permission -x -a 'completions metrics' -d 'What the key may do'
complete -c adriaticum -n '__adriaticum_at keys create' -l expires -x -a '30d 90d 365d' -d 'From when on the key is refused'
complete -c adriaticum -n '__adriaticum_at keys list' -l json -d 'Print JSON'

complete -c adriaticum -n '__adriaticum_at usage' -a show -d 'Tell one request\'s story'
complete -c adriaticum -n '__adriaticum_at usage' -a verify -d 'Look for rows that were altered, removed or put in'
complete -c adriaticum -n '__adriaticum_at usage' -l since -x -a '24h 7d 30d' -d 'Only what came since then'
complete -c adriaticum -n '__adriaticum_at usage' -l until -x -a '24h 7d 30d' -d 'Only what came before then'
complete -c adriaticum -n '__adriaticum_at usage' -l by -x -a 'hour day month key status' -d 'A row for each'
complete -c adriaticum -n '__adriaticum_at usage' -l json -d 'Print JSON'
complete -c adriaticum -n '__adriaticum_at usage' -l csv -d 'Print comma-separated values'
complete -c adriaticum -n '__adriaticum_at usage show' -l json -d 'Print JSON'

complete -c adriaticum -n '__adriaticum_at backup' -F
complete -c adriaticum -n '__adriaticum_at console' -a password -d 'Set the password of the console'

complete -c adriaticum -n '__adriaticum_at search' -a add -d 'Take files and folders in'
complete -c adriaticum -n '__adriaticum_at search' -a list -d 'Tell which there are'
complete -c adriaticum -n '__adriaticum_at search' -a remove -d 'Take one out again'
complete -c adriaticum -n '__adriaticum_at search' -a query -d 'Tell what is found for some words'
complete -c adriaticum -n '__adriaticum_at search add' -F
complete -c adriaticum -n '__adriaticum_at search list' -l json -d 'Print JSON'

complete -c adriaticum -n '__adriaticum_at check' -l json -d 'Print JSON'
