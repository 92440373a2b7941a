# SPDX-License-Identifier: Apache-2.0
"""Write the address of the repository, from `[tool.fairlead]` of the root's pyproject.toml, to files that repeat it.

urls.py             write `[project.urls]` of each package, CODEOWNERS, and the commands that clone the repository
urls.py --check     fail if one of them would change
urls.py --check https://github.com/OWNER/NAME   fail too if that is not the address
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["fairlead"]["repository"]
OWNER, NAME = REPOSITORY.rsplit("/", 2)[1:]
SITE = f"https://{OWNER}.github.io/{NAME}"


def write_urls(name: str, text: str) -> str:
    """Return the pyproject.toml of a package with the table of its addresses, above that of its version."""
    table = (
        "[project.urls]\n"
        f'Documentation = "{SITE}/packages/{name}/README.html"\n'
        f'Source = "{REPOSITORY}/tree/main/packages/{name}"\n'
        f'Changelog = "{REPOSITORY}/blob/main/packages/{name}/CHANGELOG.md"\n'
        f'Issues = "{REPOSITORY}/issues"\n\n'
    )
    text = re.sub(r"^\[project\.urls\]\n(?:\w+ = .*\n)*\n", "", text, flags=re.MULTILINE)
    return text.replace("[tool.hatch.version]\n", f"{table}[tool.hatch.version]\n", 1)


def write_owners(text: str) -> str:
    """Return the owners of the code with the owner of the repository."""
    return re.sub(r"@[\w-]+/", f"@{OWNER}/", text)


def write_clone(text: str) -> str:
    """Return a page with the address in the command that clones the repository."""
    return re.sub(r"git clone \S+ && cd \S+", f"git clone {REPOSITORY} && cd {NAME}", text)


def main(arguments: list[str]) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
    written = {path: write_urls(path.parent.name, text) for path, text in texts.items()}
    owners = ROOT / ".github/CODEOWNERS"
    texts[owners] = owners.read_text(encoding="utf-8")
    written[owners] = write_owners(texts[owners])
    for page in (ROOT / "README.md", ROOT / "docs/getting-started.md"):
        texts[page] = page.read_text(encoding="utf-8")
        written[page] = write_clone(texts[page])
    changed = [path for path, text in written.items() if text != texts[path]]
    match arguments:
        case ["--check", *expected]:
            if changed:
                sys.exit(f"urls: {', '.join(str(path.relative_to(ROOT)) for path in changed)}: run scripts/urls.py")
            if expected and expected != [REPOSITORY]:
                sys.exit(f"urls: pyproject.toml names {REPOSITORY}, but this is {expected[0]}: write it there first")
        case []:
            for path in changed:
                path.write_text(written[path], encoding="utf-8")
        case _:
            sys.exit(f"urls: unknown arguments\n\n{__doc__}")


if __name__ == "__main__":
    main(sys.argv[1:])
