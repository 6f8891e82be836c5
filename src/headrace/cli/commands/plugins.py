"""`headrace plugins`: lists the plug-ins that are installed."""

import argparse

from headrace.cli.arguments import add_json
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, Output, table
from headrace.model.errors import PluginUnavailable
from headrace.plugins import BUILT_IN, GROUPS, OURS, Plugin, list_plugins, load_exactly

_EPILOG = """\
examples:
  headrace plugins
  headrace plugins --check
  headrace plugins --group headrace.sinks --json | jq -r .name

Lists the entry points of installed packages in the groups that Headrace uses, and
its own. A plug-in is imported only when a setting, an option or an argument names
it; --check imports all of them, and exits with 1 if one cannot be used. Of two
packages with the same name in a group neither is used until one is uninstalled;
names of Headrace itself cannot be replaced.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace plugins`."""
    parser.epilog = _EPILOG
    parser.add_argument("--group", choices=GROUPS, help="only this group")
    parser.add_argument(
        "--check", dest="imports", action="store_true", help="import each plug-in, and say whether that works"
    )
    add_json(parser)
    parser.set_defaults(run=plugins)


def plugins(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the plug-ins of all groups."""
    rows: list[tuple[str, ...]] = []
    failed = False
    for group in [given.group] if given.group else GROUPS:
        found = list_plugins(group)
        for plugin in found:
            status, problem = _status(plugin, found, check=given.imports)
            failed = failed or bool(problem)
            about = {"distribution": plugin.distribution, "version": plugin.version, "target": plugin.target}
            content = {"group": group, "name": plugin.name, **about, "status": status, "problem": problem}
            if out.json:
                out.tell(content)
            rows.append((group, plugin.name, plugin.package, problem or status))
    if not out.json:
        out.tell({}, *table(("group", "name", "package", "status"), *rows))
    return EXIT_ERROR if failed else 0


def _status(plugin: Plugin, others: list[Plugin], *, check: bool) -> tuple[str, str]:
    """Whether a plug-in can be used as far as that is known, and what is wrong with it."""
    same = [other for other in others if other.name == plugin.name and other != plugin]
    if plugin.name in BUILT_IN[plugin.group] and plugin.distribution != OURS:
        return "unused", f"{plugin.name} is a name of Headrace itself"
    rivals = [other.package for other in same if other.distribution != OURS]
    if plugin.distribution != OURS and rivals:
        return "unused", f"also in {', '.join(rivals)}: uninstall all but one"
    if not check:
        return "installed", ""
    try:
        load_exactly(plugin)
    except PluginUnavailable as error:
        return "broken", str(error)
    return "loads", ""
