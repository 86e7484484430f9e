"""The documentation as a site: `make site` builds it with Sphinx from the same .md files that the repository shows."""

import re

from pygments.lexers.configs import DockerLexer
from sphinx.application import Sphinx

from fusermount3_proxy import __version__

project = "fusermount3-proxy"
version = release = __version__
project_copyright = "the authors of fusermount3-proxy"

extensions = ["myst_parser"]
#: Headings get the anchors that hosts of repositories give them, and links to these are checked.
myst_heading_anchors = 4
#: Blocks without a language are commands or drawings, and stay as they are.
highlight_language = "none"
nitpicky = True
#: Two dashes are an option, and stay two.
smartquotes = False

html_theme = "furo"
html_title = f"fusermount3-proxy {version}"
html_show_sphinx = False
html_copy_source = False
html_use_index = False

#: The pages by what their readers have come for. A page that is in none of these is below "More".
CHAPTERS = {
    "Install": ["install-systemd", "containers", "kubernetes", "where-it-runs", "releases", "migrating"],
    "Volumes in Kubernetes": ["volumes", "templates"],
    "FUSE programs": ["fuse-programs", "programs", "compatibility"],
    "Operate": ["operations", "messages", "troubleshooting", "reliability", "performance"],
    "How it works": ["architecture", "security", "protocol"],
}


def contents(pages: set[str]) -> str:
    """Return the tables of contents of all `pages`, as directives; the .md files have none of their own."""
    chapters = {title: [each for each in listed if each in pages] for title, listed in CHAPTERS.items()}
    listed = {each for chapter in chapters.values() for each in chapter}
    chapters["More"] = sorted(pages - listed - {"index"})
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: " + "\n".join([title, "", *chapter]) + "\n```\n"
        for title, chapter in chapters.items()
        if chapter
    )


def with_files(text: str) -> str:
    """Return the page with links to .md files outside docs/ as links to files, as those to all others there are.

    What a link names outside docs/ becomes a file of the site.
    """
    return re.sub(r"\]\((\.\./[^)#]*\.md)\)", r"](path:\1)", text)


def _prepare(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = with_files(source[0])
    if page == "index":
        source[0] += contents(app.env.found_docs)


def setup(app: Sphinx) -> None:
    app.add_lexer("Containerfile", DockerLexer)
    app.connect("source-read", _prepare)
