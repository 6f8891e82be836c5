"""Set-up: what is installed for which command, and Java for what runs Spark; pip, apt-get and Java are stand-ins."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.pages import ROOT

TOOLS = "sh sed cksum readlink find cp mkdir mv rm env cat chmod"
PACKAGE = "openjdk-17-jre-headless"


class Checkout:
    """A checkout with a .venv that was set up for nothing but `bin/headrace`, and all that is on the path beside it."""

    def __init__(self, path: Path) -> None:
        self.root = path / "checkout"
        self.path = path / "path"
        self._done = path / "done"
        self._environment = {"PATH": str(self.path)}
        (self.root / "bin").mkdir(parents=True)
        self.path.mkdir()
        for name in ("setup", "headrace"):
            shutil.copy(ROOT / "bin" / name, self.root / "bin")
        (self.root / "pyproject.toml").write_text("[project]\n")
        for tool in TOOLS.split():
            found = shutil.which(tool)
            assert found
            (self.path / tool).symlink_to(found)
        (self.path / "python3").symlink_to(sys.executable)
        self.be_user(1000)
        for server in ("postgres", "redis-server"):
            self.stand_in(f"{self.path}/{server}", "exit 1")
        self._make_venv()

    def _make_venv(self) -> None:
        state = self.root / ".venv" / "set-up"
        self.stand_in(
            ".venv/bin/python", f'[ "$2" != pip ] || {{ {self._note("pip")}; exit; }}; exec {sys.executable} "$@"'
        )
        self.stand_in(".venv/bin/headrace", self._note("headrace"))
        state.mkdir()
        (state / "made").write_text(f"{'.'.join(map(str, sys.version_info[:3]))} {self.root}\n")
        (state / "files").write_text("bin/python\n")
        checksum = subprocess.check_output(["cksum"], input=b"[project]\n")
        (state / "base").write_bytes(checksum)

    def _note(self, name: str) -> str:
        return f'echo {name} "$@" >>{self._done}'

    def stand_in(self, place: str, script: str) -> None:
        """Put a script at a place in the checkout, or anywhere."""
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def be_user(self, number: int) -> None:
        """Be the user with that number: 0 may install packages."""
        self.stand_in(f"{self.path}/id", f"echo {number}")

    def give_java(self, version: str, home: Path | None = None) -> None:
        """Put a Java on the path, or elsewhere and name that place in JAVA_HOME."""
        place = home / "bin" if home else self.path
        if home:
            self._environment["JAVA_HOME"] = str(home)
        self.stand_in(f"{place}/java", f"{self._note('java')}\n{says_version(version)}")

    def give_packages(self, *packages: str) -> None:
        """Put an apt-get on the path that has only these packages, and any of them only once its lists are new."""
        java = self.path / "java"
        install = f"printf '%s\\n' '#!/bin/sh' '{says_version('17.0.15')}' >{java}; chmod +x {java}; exit 0"
        cases = " ".join(f"*{package}) [ ! -e {self.path}/lists ] || {{ {install}; }} ;;" for package in packages)
        self.stand_in(
            f"{self.path}/apt-get",
            f'echo "$*" | sed "s/^.* /apt-get /" >>{self._done}\n'
            f'case "$*" in update*) echo >{self.path}/lists; exit ;; {cases} esac\nexit 100',
        )

    def lose_venv(self, **environment: str) -> None:
        """Have no .venv, and these variables; pip finds nothing."""
        shutil.rmtree(self.root / ".venv")
        self._environment |= {"PIP_NO_INDEX": "1", **environment}

    def run(self, *command: str) -> str:
        """Run a command of bin/ and return what it said."""
        self._done.unlink(missing_ok=True)
        words = [str(self.root / "bin" / command[0]), *command[1:]]
        return subprocess.run(words, env=self._environment, check=True, capture_output=True, text=True).stderr

    def done(self) -> list[str]:
        """What the last command made the stand-ins do."""
        return self._done.read_text().splitlines() if self._done.exists() else []

    def installed(self) -> list[str]:
        """What pip was made to install by the last command."""
        return [line.rpartition(" ")[2] for line in self.done() if line.startswith("pip ")]


def says_version(version: str) -> str:
    """A line of shell that says what `java -version` would."""
    return f'echo "openjdk version \\"{version}\\" 2025-04-15" >&2'


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("serve", []),
        ("pipeline run orders.py", [".[content,http,security,cluster,spark]"]),
        ("pipeline run --help", []),
        ("pipeline list", []),
        ("pipeline", []),
        ("archive run", [".[content,http,security,cluster,spark]"]),
        ("archive status", []),
        ("sql select", [".[content,http,security,cluster,spark]"]),
    ],
)
def test_only_what_runs_spark_has_it_installed(checkout: Checkout, command: str, extras: list[str]) -> None:
    checkout.give_java("17.0.15")
    checkout.run("headrace", *command.split())
    assert checkout.installed() == extras
    assert checkout.done()[-1] == f"headrace {command}"
    assert ("java -version" in checkout.done()) == bool(extras)
    assert checkout.run("headrace", *command.split()) == ""  # the second time there is nothing to do
    assert checkout.installed() == []


@pytest.mark.parametrize("extra", ["test", "bench"])
def test_tests_and_benchmarks_come_with_spark(checkout: Checkout, extra: str) -> None:
    checkout.give_java("21.0.1")
    assert "this takes a minute or two" in checkout.run("setup", extra)
    assert checkout.installed() == [f".[content,http,security,cluster,{extra}]"]
    assert checkout.run("setup", "spark") == ""


def test_java_is_installed_where_that_is_possible(checkout: Checkout) -> None:
    checkout.be_user(0)
    checkout.give_packages(PACKAGE)
    assert f"installing {PACKAGE}" in checkout.run("setup", "test")
    assert f"apt-get {PACKAGE}" in checkout.done()
    assert checkout.run("setup", "test") == ""


def test_a_later_java_is_installed_where_the_first_is_no_more(checkout: Checkout) -> None:
    checkout.be_user(0)
    checkout.give_packages("openjdk-21-jre-headless")
    checkout.run("setup", "test")
    assert checkout.done()[-1] == "apt-get openjdk-21-jre-headless"
    assert checkout.run("setup", "test") == ""


def test_java_that_cannot_be_installed_is_asked_for_each_time(checkout: Checkout) -> None:
    for _ in range(2):
        said = checkout.run("setup", "test")
        assert "Spark needs Java 17 or newer" in said
        assert f"apt-get install {PACKAGE}" in said
    assert checkout.run("setup") == ""


def test_servers_for_the_tests_of_clusters_are_installed_or_asked_for(checkout: Checkout) -> None:
    checkout.give_java("21.0.1")
    (checkout.path / "redis-server").unlink()
    for _ in range(2):
        assert "apt-get install postgresql redis-server" in checkout.run("setup", "test")
    assert checkout.run("setup", "spark") == ""
    checkout.be_user(0)
    checkout.give_packages("nothing")
    assert "installing redis-server" in checkout.run("setup", "test")
    assert {"apt-get postgresql", "apt-get redis-server"} <= set(checkout.done())


@pytest.mark.parametrize(
    ("version", "enough"), [("1.8.0_402", False), ("11.0.2", False), ("17-ea", True), ("25", True)]
)
def test_an_old_java_counts_as_none(checkout: Checkout, version: str, enough: bool) -> None:
    checkout.give_java(version)
    assert ("needs Java 17" not in checkout.run("setup", "spark")) == enough


def test_java_home_comes_first(checkout: Checkout, tmp_path: Path) -> None:
    checkout.be_user(0)
    checkout.give_packages(PACKAGE)
    checkout.give_java("17.0.15")
    checkout.give_java("11.0.2", home=tmp_path / "jdk 11")
    assert f"JAVA_HOME ({tmp_path}/jdk 11) is not" in checkout.run("setup", "spark")
    assert not [line for line in checkout.done() if line.startswith("apt-get")]
    checkout.give_java("21", home=tmp_path / "jdk 21")
    assert checkout.run("setup", "spark") == ""


def test_an_unknown_extra_is_refused(checkout: Checkout) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        checkout.run("setup", "everything")
    assert "usage: bin/setup [spark | test | bench | docs]" in caught.value.stderr
    assert caught.value.returncode == 2
    assert checkout.done() == []


def test_the_python_that_is_asked_for_makes_the_venv(checkout: Checkout) -> None:
    wanted = checkout.path / "python4"
    checkout.stand_in(f"{wanted}", 'case "$*" in *version_info*) echo 4.0.1 ;; *-m*) exit 1 ;; esac')
    checkout.lose_venv(HEADRACE_PYTHON=str(wanted))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        checkout.run("setup")
    assert f"making .venv with Python 4.0.1 ({wanted})" in caught.value.stderr


def test_the_python_of_the_system_comes_before_others_on_the_path(checkout: Checkout) -> None:
    system = "/usr/bin/python3"
    code = "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"
    if not Path(system).exists() or subprocess.run([system, "-c", code], check=False, capture_output=True).returncode:
        pytest.skip(f"{system} is none that makes a .venv")
    checkout.lose_venv(HEADRACE_PYTHON="/nowhere/python3")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        checkout.run("setup")
    said = caught.value.stderr
    assert "HEADRACE_PYTHON (/nowhere/python3) is not a working Python 3.11 or newer" in said
    assert f"({system})" in said
    assert "could not install" in said


def test_a_python_that_can_make_no_venv_is_the_last_choice(checkout: Checkout) -> None:
    """The system's, on Debian without its package; it is not asked for, as another one will do."""
    script = (checkout.root / "bin" / "setup").read_text()
    lacking = checkout.path / "lacking"
    checkout.stand_in(f"{lacking}", 'case "$*" in *version_info*) echo 3.11.2 ;; *ensurepip*) exit 1 ;; esac')
    (checkout.root / "bin" / "setup").write_text(script.replace("/usr/bin/python3", str(lacking)))
    checkout.lose_venv()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        checkout.run("setup")
    assert "(python3)" in caught.value.stderr
    (checkout.path / "python3").unlink()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        checkout.run("setup")
    assert f"{lacking} lacks the venv or ensurepip module" in caught.value.stderr


def test_a_checkout_that_cannot_be_written_says_what_to_do() -> None:
    as_user: list[str] = []
    if os.geteuid() == 0:  # who may write everywhere
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is not installed")
        as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        root.chmod(0o755)
        (root / "bin").mkdir()
        shutil.copy(ROOT / "bin" / "setup", root / "bin")
        root.chmod(0o555)
        done = subprocess.run([*as_user, str(root / "bin" / "setup")], capture_output=True, text=True, check=False)
        root.chmod(0o755)
    assert done.returncode == 1
    assert f"{place} is read-only" in done.stderr
    assert f"pip install '{place}'" in done.stderr
    assert done.stdout == ""
