# SPDX-License-Identifier: Apache-2.0
"""How the documentation is built: `nox -s docs`.

The source folder is the root of the repository, so that READMEs and changelogs are pages where they stand, and a link
that leads somewhere on a checkout leads there on the site.
"""

import importlib
import inspect
import itertools
import re
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

ROOT = Path(__file__).parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["fairlead"]["repository"]

project = "Fairlead"
author = "the authors of Fairlead"
project_copyright = author
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "SECURITY.md",
    "benchmarks/RESULTS.md",
    "docs/**.md",
    "packages/*/README.md",
    "packages/*/CHANGELOG.md",
]
exclude_patterns = [".*", "build", "**/src", "**/tests"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.linkcode",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# Commands are copied without the prompt and without the output.
copybutton_prompt_text = "$ "
autosummary_generate = False
smartquotes = False
nitpicky = True
# Everything that is not Fairlead's own: no list of other projects' names is fetched, the build needs no network.
nitpick_ignore_regex = [("py:.*", r"(?!fairlead_).*")]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

napoleon_numpy_docstring = False
napoleon_use_ivar = True
# In a docstring `name` is code, and a link where the name is a documented one.
default_role = "py:obj"
add_module_names = False
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    # What a class has from its own private bases is part of it; what it has from Python is not.
    "inherited-members": "dict, BaseException, Exception, BaseExceptionGroup, ExceptionGroup, OSError, tuple, object",
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
python_display_short_literal_types = True

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]
html_copy_source = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "",
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#1f5f99", "color-brand-content": "#1f5f99"},
    "dark_css_variables": {"color-brand-primary": "#79b4e8", "color-brand-content": "#79b4e8"},
}

# From a docstring: pkg @ https://...
linkcheck_ignore = [r"https://$"]
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_workers = 4


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of the source of a documented name; None for a name without lines of its own."""
    target = importlib.import_module(info["module"])
    try:
        for part in info["fullname"].split("."):
            target = inspect.getattr_static(target, part)
        target = getattr(target, "fget", None) or getattr(target, "__func__", target)
        target = inspect.unwrap(target)
        lines, first = inspect.getsourcelines(target)
        file = Path(inspect.getsourcefile(target) or "")
    except (AttributeError, TypeError, OSError):
        return None
    package = next((name for name in file.parts if name.startswith("fairlead_")), None)
    if package is None:
        return None
    path = "/".join(file.parts[file.parts.index(package) :])
    folder = package.removeprefix("fairlead_").replace("_", "-")
    return f"{REPOSITORY}/blob/main/packages/{folder}/src/{path}#L{first}-L{first + len(lines) - 1}"


HANDLES = {"Call", "DeviceClass", "DeviceFunction", "DeviceInstances", "GroupView", "SlotClaim"}
PRIVATE = re.compile(r"(fairlead_\w+)\.(?:(?:_\w+|model)\.(?:\w+\.)?)?(\w+)")
# Public modules beside the package itself, whose names have an entry as theirs.
MODULES = {"fairlead_placement": ("fairlead_placement", "fairlead_placement.extension")}


def public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.Node | None:
    """Where a name leads to: a type hint has it of a private module, its entry is that of the package."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if (parts := PRIVATE.fullmatch(target)) is not None:
        package, name = parts.groups()
        for module in MODULES.get(package, (package,)):
            if name in importlib.import_module(module).__all__:
                domain, entry = env.get_domain("py"), f"{module}.{name}"
                return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", entry, node, contnode)
        return contnode if "._" in target else None
    # A piece of code in a docstring that is no name of ours.
    return contnode if node["reftype"] == "obj" and not node.get("refexplicit") else None


def without_folders(app: Sphinx, doctree: nodes.document) -> None:
    """A link to a folder of the repository leads nowhere on the site: its text stays."""
    for link in [one for one in doctree.findall(pending_xref) if one["reftype"] == "myst"]:
        page = Path(app.env.doc2path(link["refdoc"]))
        if link["refdomain"] is None and (page.parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def public_bases(app: Sphinx, name: str, what: type, options: object, bases: list[type]) -> None:
    """Bases that a reader can look up: what comes from the others stands under the class itself."""
    public = [base for base in bases if not base.__module__.startswith("fairlead_") or is_public(base)]
    bases[:] = public or [object]


def without_object(app: Sphinx, doctree: nodes.document) -> None:
    """`Bases: object` says nothing."""
    for paragraph in [one for one in doctree.findall(nodes.paragraph) if one.astext() == "Bases: object"]:
        paragraph.parent.remove(paragraph)


def no_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, answer: str | None
) -> tuple[str, str | None] | None:
    """Handles are made by functions; how is not the reader's concern."""
    return ("", None) if name.rpartition(".")[2] in HANDLES and what == "class" else None


def as_napoleon_reads(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Types are in the signatures: what stands before a colon, or alone, in these sections is no type."""
    if what in ("property", "attribute", "data") and lines:
        lines[0] = f": {lines[0]}"
    for at, (above, line) in enumerate(itertools.pairwise(lines), start=1):
        if above.strip() in ("Returns:", "Yields:"):
            lines[at] = re.sub(r"\S", r": \g<0>", line, count=1)
        elif above.strip() == "Raises:":
            lines[at] = re.sub(r"As (`\w+`)\.", r"Exception: as \1.", line)


def indented_code(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """In a docstring, what is indented after a blank line is code, as it is in Markdown."""
    done: list[str] = []
    for line in lines:
        before = [one for one in done if one][-1:]
        if line.startswith("    ") and done[-1:] == [""] and before and re.match(r"[^\s:>.*-]", before[0]):
            done += [".. code-block:: python", ""]
        done.append(line)
    lines[:] = done


def is_public(one: type) -> bool:
    package = importlib.import_module(one.__module__.partition(".")[0])
    return one.__name__ in package.__all__


def all_is_there(app: Sphinx, env: BuildEnvironment) -> None:
    """Every public name has an entry."""
    there = env.get_domain("py").objects
    for package in {name.partition(".")[0] for name in there if name.startswith("fairlead_")}:
        for name in importlib.import_module(package).__all__:
            if name != "__version__" and f"{package}.{name}" not in there:
                logging.getLogger(__name__).warning("%s.%s has no entry in the reference", package, name)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", as_napoleon_reads, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", indented_code, priority=600)  # after napoleon
    app.connect("autodoc-process-signature", no_signature)
    app.connect("doctree-read", without_object)
    app.connect("doctree-read", without_folders)
    app.connect("env-check-consistency", all_is_there)
    app.connect("missing-reference", public_name)
    app.connect("autodoc-process-bases", public_bases)
