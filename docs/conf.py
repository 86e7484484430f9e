"""The documentation as a site: `make site` builds it with Sphinx from the same .md files that the repository shows."""

import itertools
import re
from typing import Any

from pygments.lexers.configs import DockerLexer
from sphinx.application import Sphinx

from fusermount3_proxy import __version__

project = "fusermount3-proxy"
version = release = __version__
project_copyright = "the authors of fusermount3-proxy"

extensions = ["myst_parser", "sphinx_copybutton"]
#: Headings get the anchors that hosts of repositories give them, and links to these are checked.
myst_heading_anchors = 4
#: Blocks without a language are commands or drawings, and stay as they are.
highlight_language = "none"
nitpicky = True
#: Two dashes are an option, and stay two.
smartquotes = False

html_theme = "furo"
html_static_path = ["site/static"]
templates_path = ["site/templates"]
html_css_files = ["site.css"]
html_title = f"fusermount3-proxy {version}"
html_show_sphinx = False
html_copy_source = False
html_use_index = False
#: Commands and files are to be copied; drawings and logs are to be read. What is typed on a console follows its prompt.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = r"[$#] "
copybutton_prompt_is_regexp = True

#: The pages by what their readers have come for. A page that is in none of these is below "More".
CHAPTERS = {
    "Start": ["kubernetes", "containers", "install-systemd", "ci"],
    "Install": ["where-it-runs", "releases", "migrating"],
    "Volumes in Kubernetes": ["volumes", "templates", "provisioning", "block-volumes"],
    "FUSE programs": ["fuse-programs", "programs", "compatibility"],
    "Operate": ["operations", "messages", "troubleshooting", "reliability", "performance"],
    "How it works": ["architecture", "security", "protocol"],
}
#: The ways in, by what a reader has: shorter than the pages' own titles.
TITLES = {"containers": "Docker and Podman", "install-systemd": "systemd"}


def contents(pages: set[str]) -> str:
    """Return the tables of contents of all `pages`, as directives; the .md files have none of their own."""
    chapters = {title: [each for each in listed if each in pages] for title, listed in CHAPTERS.items()}
    listed = {each for chapter in chapters.values() for each in chapter}
    chapters["More"] = sorted(pages - listed - {"index"})
    entries = {name: f"{TITLES[name]} <{name}>" if name in TITLES else name for name in pages}
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: " + "\n".join([title, "", *map(entries.__getitem__, chapter)]) + "\n```\n"
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


def accessible(body: str) -> str:
    """Return the page with what may scroll in itself, blocks and tables, in the order of the Tab key."""
    numbers = itertools.count(1)
    return re.sub(
        '<div class="table-wrapper',
        lambda found: f'<div tabindex="0" role="region" aria-label="Table {next(numbers)}"{found[0][4:]}',
        body.replace("<pre>", '<pre tabindex="0">'),
    )


def _finish(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    if "body" in context:
        context["body"] = accessible(context["body"])
    # The captions of chapters have no level, which a heading needs.
    context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


def setup(app: Sphinx) -> None:
    app.add_lexer("Containerfile", DockerLexer)
    app.connect("html-page-context", _finish, priority=900)  # after the theme's
    app.connect("source-read", _prepare)
