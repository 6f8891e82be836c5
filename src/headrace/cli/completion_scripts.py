"""Generators of the completion scripts for bash, zsh and fish."""

import shlex
from collections.abc import Iterator

from headrace.cli.command_tree import ANYTHING, NAMED, CommandNode, Option, Value

_BASH = """\
# Completion of headrace for bash. To load it: source <(headrace completion bash)

_headrace_names() {
    local connect=()
    if [[ $1 == context ]]; then
        headrace context list --names 2>/dev/null </dev/null
        return
    fi
    [[ $COMP_LINE =~ --context[=\\ ]+([^\\ ]+) ]] && connect=(--context "${BASH_REMATCH[1]}")
    [[ $COMP_LINE =~ --connect[=\\ ]+([^\\ ]+) ]] && connect=(--connect "${BASH_REMATCH[1]}")
    headrace "$1" list --names --timeout 1 "${connect[@]}" 2>/dev/null </dev/null
}

# Names may contain spaces and shell metacharacters, which compgen would expand: so it is not used.
_headrace_offer_names() {
    local name quoted
    while IFS= read -r name; do
        printf -v quoted %q "$name"
        if [[ $name == "$word"* || $quoted == "$word"* ]]; then
            COMPREPLY+=("$quoted")
        fi
    done < <(_headrace_names "$1")
}

_headrace_offer() {
    local IFS=$'\\n'
    case $1 in
        @NAMED@) _headrace_offer_names "$1" ;;
        file) compopt -o filenames; COMPREPLY=($(compgen -f -- "$word")) ;;
        directory) compopt -o filenames; COMPREPLY=($(compgen -d -- "$word")) ;;
        anything) ;;
        *) COMPREPLY=($(IFS=' '; compgen -W "$1" -- "$word")) ;;
    esac
}

_headrace() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} path="" skip="" count=0 i
    COMPREPLY=()
    if [[ $word == "=" ]]; then
        word=""
    elif [[ $before == "=" ]]; then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${COMP_WORDS[i]} == [=:] || ${COMP_WORDS[i - 1]} == [=:] ]]; then
            continue
        elif [[ $skip ]]; then
            skip=""
            continue
        fi
        case "$path ${COMP_WORDS[i]}" in
            @COMMANDS@) path="$path ${COMP_WORDS[i]}" ;;
            @TAKING@) skip=yes ;;
            *" -"*) ;;
            *) ((count++)) ;;
        esac
    done
    case "$path $before" in
@VALUES@
    esac
    if [[ $word == -* ]]; then
        case $path in
@OPTIONS@
        esac
        return
    fi
    case "$path $count" in
@PLACES@
    esac
}

complete -F _headrace headrace
"""

_ZSH = """\
#compdef headrace
# Completion of headrace for zsh. To load it: source <(headrace completion zsh)

_headrace_names() {
    local -a names connect
    if [[ $1 == context ]]; then
        names=(${(f)"$(headrace context list --names 2>/dev/null </dev/null)"})
        compadd -a names
        return
    fi
    local at=${words[(I)--context]}
    ((at)) && connect=(--context "${(Q)words[at + 1]}")
    at=${words[(I)--connect]}
    ((at)) && connect=(--connect "${(Q)words[at + 1]}")
    names=(${(f)"$(headrace $1 list --names --timeout 1 $connect 2>/dev/null </dev/null)"})
    compadd -a names
}

@FUNCTIONS@
if [[ $funcstack[1] == _headrace ]]; then
    _headrace "$@"
else
    compdef _headrace headrace
fi
"""

_FISH = """\
# Completion of headrace for fish. To load it: headrace completion fish | source

function __headrace_names
    if test "$argv[1]" = context
        headrace context list --names 2>/dev/null </dev/null
        return
    end
    set -l connect
    set -l words (commandline -opc)
    set -l at (contains -i -- --context $words)
    and set connect --context $words[(math $at + 1)]
    set at (contains -i -- --connect $words)
    and set connect --connect $words[(math $at + 1)]
    headrace $argv[1] list --names --timeout 1 $connect 2>/dev/null </dev/null
end

# Succeeds if the words so far name this command and, if a number is given, that many values follow.
function __headrace_at
    set -l path headrace
    set -l count 0
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if contains -- "$path $word" @COMMANDS@
            set path "$path $word"
        else if contains -- "$path $word" @TAKING@
            set skip 1
        else if not string match -q -- '-*' $word
            set count (math $count + 1)
        end
    end
    test "$path" = "$argv[1]"; or return 1
    set -q argv[2]; or return 0
    test "$count" = "$argv[2]"; and return 0
    string match -q -- '*+' $argv[2]; and test $count -ge (string trim -r -c + -- $argv[2])
end

complete -c headrace -f
@LINES@
"""


def bash(root: CommandNode) -> str:
    """Return the completion script for bash."""
    nodes = list(root.walk())
    values, options, places = [], [], []
    for node in nodes:
        path = _spaced(node)
        for option in node.options:
            if option.value is not None:
                patterns = " | ".join(f'"{path} {name}"' for name in option.names)
                values.append(f"        {patterns}) _headrace_offer {_bash_value(option.value)}; return ;;")
        names = " ".join(name for option in node.options for name in option.names)
        options.append(f'            "{path}") _headrace_offer "{names}" ;;')
        if node.below:
            places.append(
                f'        "{path} 0") _headrace_offer "{" ".join(below.path[-1] for below in node.below)}" ;;'
            )
        for number, value in enumerate(node.values):
            pattern = f'"{path} "*' if value.repeated else f'"{path} {number}"'
            places.append(f"        {pattern}) _headrace_offer {_bash_value(value)} ;;")
    commands = " | ".join(f'"{_spaced(node)}"' for node in nodes if node.path)
    return _filled(
        _BASH,
        NAMED=" | ".join(NAMED),
        COMMANDS=commands,
        TAKING=" | ".join(f'"{text}"' for text in _taking(nodes, "")),
        VALUES="\n".join(values),
        OPTIONS="\n".join(options),
        PLACES="\n".join(places),
    )


def _bash_value(value: Value) -> str:
    return f'"{" ".join(value.choices)}"' if value.choices else value.kind


def zsh(root: CommandNode) -> str:
    """Return the completion script for zsh."""
    names = "".join(f"_headrace_{kind}_names() {{ _headrace_names {kind} }}\n" for kind in NAMED)
    return _filled(_ZSH, FUNCTIONS="\n".join([names, *(_zsh_function(node) for node in root.walk())]))


def _zsh_function(node: CommandNode) -> str:
    specs = [spec for option in node.options for spec in _zsh_option(option)]
    name = "_".join(["_headrace", *node.path])
    if not node.below:
        specs += [_zsh_place(value) for value in node.values]
        return f"{name}() {{\n    _arguments -s \\\n        " + " \\\n        ".join(specs) + "\n}\n"
    commands = [_zsh_quoted(f"{below.path[-1]}:{below.summary}") for below in node.below]
    cases = [f"{below.path[-1]}) {name}_{below.path[-1]} ;;" for below in node.below]
    return (
        f"{name}() {{\n"
        "    local state line curcontext=$curcontext\n"
        "    local -a commands\n"
        "    typeset -A opt_args\n"
        "    commands=(\n        " + "\n        ".join(commands) + "\n    )\n"
        "    _arguments -C \\\n        "
        + " \\\n        ".join([*specs, "'1:command:->command'", "'*::word:->words'"])
        + "\n"
        "    case $state in\n"
        "        command) _describe command commands ;;\n"
        "        words)\n"
        "            case $words[1] in\n                " + "\n                ".join(cases) + "\n"
        "            esac\n            ;;\n"
        "    esac\n}\n"
    )


def _zsh_option(option: Option) -> Iterator[str]:
    summary = option.summary.replace("[", "\\[").replace("]", "\\]")
    others = "*" if option.repeated else f"({' '.join(option.names)})"
    value = "" if option.value is None else f":{option.value.name}:{_zsh_action(option.value)}"
    for name in option.names:
        yield _zsh_quoted(f"{others}{name}[{summary}]{value}")


def _zsh_place(value: Value) -> str:
    return _zsh_quoted(f"{'*' if value.repeated else ''}:{value.name}:{_zsh_action(value)}")


def _zsh_action(value: Value) -> str:
    if value.choices:
        return f"({' '.join(value.choices)})"
    if value.kind in NAMED:
        return f"_headrace_{value.kind}_names"
    return {"file": "_files", "directory": "_files -/"}.get(value.kind, " ")


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish(root: CommandNode) -> str:
    """Return the completion script for fish."""
    nodes = list(root.walk())
    lines = []
    for node in nodes:
        path = "headrace" + _spaced(node)
        lines += [
            f"complete -c headrace -n {_fish_quoted(f'__headrace_at {shlex.quote(path)} 0')} -a {below.path[-1]} "
            f"-d {_fish_quoted(below.summary)}"
            for below in node.below
        ]
        for number, value in enumerate(node.values):
            condition = f"__headrace_at {shlex.quote(path)} {number}{'+' if value.repeated else ''}"
            if offer := _fish_offer(value):
                lines.append(f"complete -c headrace -n {_fish_quoted(condition)} {offer}")
        for option in node.options:
            names = " ".join(f"-{'l' if name.startswith('--') else 's'} {name.lstrip('-')}" for name in option.names)
            condition = f"__headrace_at {shlex.quote(path)}"
            offer = "" if option.value is None else f" {_fish_taken(option.value)}"
            lines.append(
                f"complete -c headrace -n {_fish_quoted(condition)} {names}{offer} -d {_fish_quoted(option.summary)}"
            )
    return _filled(
        _FISH,
        COMMANDS=" ".join(_fish_quoted("headrace" + _spaced(node)) for node in nodes if node.path),
        TAKING=" ".join(map(_fish_quoted, _taking(nodes, "headrace"))),
        LINES="\n".join(lines),
    )


def _fish_offer(value: Value) -> str:
    if value.choices:
        return f"-a {_fish_quoted(' '.join(value.choices))}"
    if value.kind in NAMED:
        return f"-a '(__headrace_names {value.kind})'"
    if value.kind == "directory":
        return "-a '(__fish_complete_directories)'"
    return "" if value.kind == ANYTHING else "-F"


def _fish_taken(value: Value) -> str:
    """Return the flags for an option with a value; only values of kind file complete file names."""
    offer = _fish_offer(value)
    return f"-r {offer}" if offer == "-F" else f"-x {offer}".rstrip()


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _spaced(node: CommandNode) -> str:
    return "".join(f" {word}" for word in node.path)


def _taking(nodes: list[CommandNode], prefix: str) -> list[str]:
    """Return the commands, each with its options that take a value."""
    return [
        f"{prefix}{_spaced(node)} {name}"
        for node in nodes
        for option in node.options
        if option.value is not None
        for name in option.names
    ]


def _filled(template: str, **parts: str) -> str:
    for name, part in parts.items():
        template = template.replace(f"@{name}@", part)
    return template
