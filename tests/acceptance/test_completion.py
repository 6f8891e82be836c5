"""Completion: what shells offer at every place of the command line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import completion_scripts
from headrace.cli.command_list import COMMANDS, whole_parser
from headrace.cli.command_tree import CommandNode, command_tree

NAMES = "headrace() { printf 'alpha\\nbeta\\n'; }\ncompopt() { :; }\n"
ASK = 'COMP_LINE="$*"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _headrace; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def tree() -> CommandNode:
    return command_tree(whole_parser())


def run_bash(script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a script, which is too long for an argument."""
    return subprocess.run(["bash", "-s", "--", *words], input=script, capture_output=True, text=True, check=True)


def bash(tree: CommandNode, *words: str) -> list[str]:
    """What bash offers when the last word is being typed."""
    done = run_bash(f"{NAMES}{completion_scripts.bash(tree)}\n{ASK}", *words)
    assert done.stderr == ""
    return [line for line in done.stdout.split("\n") if line]


def test_every_command_is_in_the_tree(tree: CommandNode) -> None:
    assert [node.path[0] for node in tree.below] == [name for group in COMMANDS.values() for name in group]
    for node in tree.walk():
        assert node.summary
        assert any("--help" in option.names for option in node.options)


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("headrace to|", ["topic"]),
        ("headrace topic |", ["create", "list", "describe", "alter", "trim", "history", "delete"]),
        ("headrace topic create t --stor|", ["--storage"]),
        ("headrace topic create t --durability |", ["memory", "written", "synced", "replicated"]),
        ("headrace topic create t --durability = w|", ["written"]),
        ("headrace topic create |", []),
        ("headrace topic describe |", ["alpha", "beta"]),
        ("headrace tail a|", ["alpha"]),
        ("headrace tail alpha |", ["alpha", "beta"]),
        ("headrace tail --group |", ["alpha", "beta"]),
        ("headrace publish --key topic |", ["alpha", "beta"]),
        ("headrace publish alpha |", []),
        ("headrace publish --key |", []),
        ("headrace group seek alpha b|", ["beta"]),
        ("headrace group seek --to 5 alpha beta |", []),
        ("headrace tail --connect |", []),
        ("headrace publish --connect headrace : //127.0.0.1 : 1 |", ["alpha", "beta"]),
        ("headrace completion |", ["bash", "zsh", "fish"]),
        ("headrace log v|", ["verify"]),
        ("headrace --ver|", ["--version"]),
    ],
)
def test_what_bash_offers(tree: CommandNode, line: str, offers: list[str]) -> None:
    assert bash(tree, *line.rstrip("|").split(" ")) == offers


def test_bash_offers_names_as_they_have_to_be_typed(tree: CommandNode, tmp_path: Path) -> None:
    """Nothing in a name is run: completion asks a broker, to which others give the names."""
    odd = ["two words", f"$(touch {tmp_path}/run)", f"`touch {tmp_path}/run`", "$HOME", "a'b", "größe", "x|y;z"]
    names = "\n".join(odd)
    script = f"headrace() {{ cat <<'END'\n{names}\nEND\n}}\n{completion_scripts.bash(tree)}\n{ASK}"

    def offered(word: str) -> list[str]:
        return run_bash(script, "headrace", "tail", word).stdout.splitlines()

    typed = ["bash", "-c", "printf '%s\\n' " + " ".join(offered(""))]
    assert subprocess.run(typed, capture_output=True, text=True, check=True).stdout.splitlines() == odd
    assert not (tmp_path / "run").exists()
    assert offered(r"two\ w") == offered("two w") == [r"two\ words"]


def test_bash_offers_files(tree: CommandNode, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert bash(tree, "headrace", "publish", "t", "--file", f"{tmp_path}/") == [
        f"{tmp_path}/file",
        f"{tmp_path}/folder",
    ]
    assert bash(tree, "headrace", "log", "read", f"{tmp_path}/") == [f"{tmp_path}/folder"]


def test_names_that_cannot_be_had_are_no_error(tree: CommandNode) -> None:
    script = f"{completion_scripts.bash(tree)}\nheadrace() {{ echo oh no >&2; return 1; }}\n{ASK}"
    done = run_bash(script, "headrace", "tail", "")
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_can_be_read(shell: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "headrace", "completion", shell], capture_output=True, check=True)
    assert b"Traceback" not in done.stderr
    script = tmp_path / "script"
    script.write_bytes(done.stdout)
    assert b"@" not in done.stdout.replace(b'"$@"', b"").replace(b"[@]", b"")
    if not (program := shutil.which(shell)):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", str(script)], check=True)


def test_what_fish_offers(tree: CommandNode, tmp_path: Path) -> None:
    if not (program := shutil.which("fish")):
        pytest.skip("fish is not installed")
    names = "function headrace; printf 'alpha\\nbeta\\n'; end"
    asked = {
        "headrace topic ": ["alter", "create", "delete", "describe", "list"],
        "headrace tail ": ["alpha", "beta"],
        "headrace publish alpha ": [],
        "headrace topic create t --durability ": ["memory", "synced", "written"],
    }
    for line, offers in asked.items():
        script = f"{names}\n{completion_scripts.fish(tree)}\ncomplete -C '{line}'"
        done = subprocess.run(
            [program, "--no-config", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert [offered.partition("\t")[0] for offered in done.stdout.splitlines()] == offers
